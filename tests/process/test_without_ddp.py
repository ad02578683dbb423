"""Strategies without DDP on two ranks: they train as one process does, and ranks that end apart are found."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.gradient_hooks import GradientHooks
from examples.model_averaging import ModelAveraging
from rankwise import DDPForkStrategy, DDPStrategy, Fabric, Strategy, Trainer
from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError, RankwiseError, UnknownArgumentError, WorkerRaisedError
from tests.helpers.parameters import in_turn
from tests.helpers.shared import computed_once
from tests.process.test_sparse_gradients import Embedded, weights
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Wrapper(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)


class Wrapping(Strategy):
    """Returns a wrapper that is not DDP."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return Wrapper(super().setup_module(module))

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        return super().unwrap_module(module.module if isinstance(module, Wrapper) else module)


CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "start_method": "fork"}
AVERAGING: dict[str, Callable[[], Strategy]] = {
    "gradients": lambda: Strategy(**CPU),
    "hooks": lambda: GradientHooks(**CPU),
    "wrapper": lambda: Wrapping(**CPU),
    "models": lambda: ModelAveraging(period=1, **CPU),
}


class ByHand(Regression):
    """Steps by hand in each second batch, with clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with self.no_backward_sync(enabled=not is_last):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def fit(strategy: Any, devices: int, module: Regression, **arguments: Any) -> dict[str, Tensor]:
    """Train two epochs of 24 samples; return the weights."""
    trainer = quiet_trainer(strategy, devices, max_epochs=2, **arguments)
    trainer.fit(module, loader(24, 4 // devices))
    return module.net.state_dict()


KINDS: dict[str, tuple[type[Regression], dict[str, Any]]] = {
    "automatic": (Regression, {"accumulate_grad_batches": 2}),
    "manual": (ByHand, {}),
}


@pytest.fixture
@computed_once
def expected() -> dict[str, dict[str, Tensor]]:
    """The weights of one process, for each kind of optimisation."""
    return {kind: fit("single_device", 1, make(), **options) for kind, (make, options) in KINDS.items()}


@pytest.mark.quick
@pytest.mark.parametrize(("name", "kind"), in_turn(AVERAGING, ["manual", "automatic"]))
def test_training_equals_one_process(name: str, kind: str, expected: dict[str, Any]) -> None:
    """Windows of two batches, automatic and manual, have one process's weights."""
    make, options = KINDS[kind]
    found = fit(AVERAGING[name](), 2, make(), **options)
    torch.testing.assert_close(found, expected[kind], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["wrapper", "hooks"])
def test_clipping_comes_after_synchronisation(name: str) -> None:
    """What is clipped is the mean of gradients; the ranks are compared after each step."""
    alone = fit("single_device", 1, Regression(), gradient_clip_val=0.1)
    found = fit(AVERAGING[name](), 2, Regression(), gradient_clip_val=0.1, check_ranks_every_n_steps=1)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


class Keep(Callback):
    """Saves a checkpoint after the second step; keeps the models that the ranks have then, and at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in (2, 12):
            self.before.append(trainer.strategy.all_gather(module.net[2].bias.detach()))
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def test_models_may_differ_between_averages(tmp_path: Path) -> None:
    """A checkpoint, and the end of a fit, have the mean of models that differ; epochs do not compare them."""
    keep, module = Keep(tmp_path / "a.ckpt"), Regression()
    found = fit(ModelAveraging(period=100, **CPU), 2, module, callbacks=[keep])
    saved = torch.load(keep.path, weights_only=True)["state_dict"]["net.2.bias"]
    at_checkpoint, at_end = keep.before
    assert at_checkpoint[0] != at_checkpoint[1]
    assert at_end[0] != at_end[1]
    torch.testing.assert_close(saved, at_checkpoint.mean(0))
    torch.testing.assert_close(found["2.bias"], at_end.mean(0))


class NeverAveraged(ModelAveraging):
    def sync_models(self) -> None:
        pass


class AveragedLate(GradientHooks):
    """Waits for the averages in `optimizer_step`, after gradients were clipped."""

    def sync_gradients(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
        super().sync_gradients(self.parameters)
        return super().optimizer_step(optimizer, closure, **options)


class OwnBlock(DDPForkStrategy):
    def setup_module(self, module: nn.Module) -> nn.Module:
        return self.module_to_device(module)

    def gradient_sync_context(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


class NotConnected(Strategy):
    def setup_environment(self) -> None:
        pass


MISTAKES: dict[str, tuple[Callable[[], Strategy], str, str]] = {
    "sync_models": (
        lambda: NeverAveraged(period=100, **CPU),
        "RankMismatchError: The ranks are not the same in 4 things at the end of fit",
        r"NeverAveraged\.sync_models\(\) must give all ranks the same parameters\.",
    ),
    "optimizer_step": (
        lambda: AveragedLate(**CPU),
        "RankMismatchError",
        r"AveragedLate\.sync_gradients\(\) must leave the same gradients on all",
    ),
    "gradient_sync_context": (
        lambda: OwnBlock(accelerator="cpu", devices=2),
        "RankMismatchError",
        r"OwnBlock\.sync_gradients\(\) must leave the same gradients",
    ),
    "setup_environment": (
        lambda: NotConnected(**CPU),
        r"LifecycleError: NotConnected\.setup_environment\(\) was called.* needs a process group",
        r"call super\(\)\.setup_environment\(\) in it",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    """A strategy whose ranks end apart, or are not connected, fails, and the error names its method."""
    make, problem, fix = MISTAKES[mistake]
    with pytest.raises(WorkerRaisedError, match=f"(?s){problem}.*Fix: {fix}"):
        fit(make(), 2, Regression(), gradient_clip_val=0.01)


@pytest.mark.parametrize(
    ("fails", "error", "match"),
    [
        (lambda: ModelAveraging(perod=2), UnknownArgumentError, "Did you mean 'period'"),
        (
            lambda: fit(ModelAveraging(**CPU), 2, Regression(), check_ranks_every_n_steps=1),
            ConfigurationError,
            "with a strategy that averages models",
        ),
        (
            lambda: fit(OwnBlock(accelerator="cpu"), 2, ByHand()),
            ConfigurationError,
            r"OwnBlock\.gradient_sync_context\(\) is not called.*sync_gradients\(\)",
        ),
        (
            lambda: weights(Embedded(), Strategy(**CPU), 2),
            WorkerRaisedError,
            "cannot average sparse gradients",
        ),
        (
            lambda: fit(Strategy(sync_batchnorm=True, **CPU), 2, Regression()),
            ConfigurationError,
            "sync_batchnorm=True is not possible on the CPU",
        ),
    ],
    ids=["argument", "comparison", "manual", "sparse", "sync_batchnorm"],
)
def test_refusals(fails: Callable[[], Any], error: type[RankwiseError], match: str) -> None:
    """What cannot work is an error that says what to write."""
    with pytest.raises(error, match=f"(?s){match}"):
        fails()


@pytest.mark.parametrize("kind", [Strategy, DDPStrategy])
def test_a_group_that_the_function_should_have_made(kind: type[Strategy]) -> None:
    """Without the strategy's group, `setup_module` says what is missing."""
    fix = r"(?s)setup_module\(\) was called.*Fix: .*torch\.distributed\.init_process_group\(\) before it"
    with pytest.raises(WorkerRaisedError, match=fix):
        kind(rendezvous="tcp", **CPU).launch(
            lambda strategy: strategy.setup_module(nn.Linear(1, 1)), init_process_group=False
        )


def step_of(fabric: Fabric, *, has_block: bool) -> Tensor:
    """Take one step in a loop of one's own; return a gradient."""
    model = nn.Linear(1, 1)
    wrapped = fabric.setup(model)
    with fabric.gradient_sync_context(wrapped) if has_block else nullcontext():
        fabric.backward(wrapped(torch.full((1, 1), fabric.global_rank + 1.0)).sum())
    assert model.weight.grad is not None
    return model.weight.grad


def test_a_loop_of_ones_own() -> None:
    """A Fabric averages at the end of `gradient_sync_context`, and refuses a backward pass outside of it."""
    fabric = Fabric(strategy=Strategy(**CPU), accelerator="cpu", devices=2)
    assert fabric.launch(step_of, has_block=True).item() == 1.5
    with pytest.raises(WorkerRaisedError, match="averages gradients at the end of the block"):
        fabric.launch(step_of, has_block=False)

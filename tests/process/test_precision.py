"""Precision on two ranks: both have the same weights and skip the same steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from rankwise import DDPStrategy
from rankwise.callbacks import LambdaCallback
from rankwise.errors import WorkerRaisedError
from rankwise.precision import MasterWeightsPrecision, MixedPrecision, Precision, create_precision
from rankwise.testing import run_distributed
from tests.helpers.shared import computed_once
from tests.process.helpers import count_calls, ddp
from tests.process.training_tasks import Regression, loader, trainer_on

NAMES = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "16-master", "bf16-master")
BAD_STEP = 2
LIMIT = 0.01


def create(name: str) -> Precision:
    """Return a precision whose scale, if it has one, is low enough not to overflow by itself."""
    if name == "16-mixed":
        return MixedPrecision(name, init_scale=64.0)
    return MasterWeightsPrecision(name, init_scale=64.0) if name == "16-master" else create_precision(name)


def train(strategy: DDPStrategy, name: str) -> dict[str, Any]:
    """Take 5 steps, with an infinite loss on rank 1 in one of them; return what every rank has seen."""
    torch.manual_seed(1 + strategy.global_rank)
    strategy.precision = create(name)
    model = strategy.setup_module(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    precision = strategy.precision
    precision.configure(strategy.unwrap_module(model), [optimizer])
    skipped, norms, largest = [], [], []
    for step in range(5):
        precision.zero_grad(optimizer)
        with precision.forward_context():
            loss = model(precision.convert_input(torch.randn(6, 4))).square().mean()
        is_bad = precision.scales_loss and step == BAD_STEP and strategy.global_rank == 1
        strategy.backward(loss * float("inf") if is_bad else loss)
        norms.append(float(precision.clip_gradients_norm(optimizer, LIMIT, float("inf"))))
        gradients = [parameter.grad for parameter in precision.main_parameters(optimizer)]
        largest.append(max(float(gradient.abs().max()) for gradient in gradients if gradient is not None))
        strategy.optimizer_step(optimizer)
        skipped.append(precision.has_skipped_step)
    state = {key: value.float() for key, value in strategy.get_module_state_dict(model).items()}
    weights = torch.cat([state[key].flatten() for key in ("0.weight", "1.weight", "2.weight")])
    return {"skipped": skipped, "norms": norms, "largest": largest, "weights": weights}


@pytest.fixture
@computed_once
def by_rank() -> list[dict[str, Any]]:
    """Return what each of two ranks recorded, by precision."""
    return run_distributed(lambda strategy: {name: train(strategy, name) for name in NAMES})


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_alike(name: str, by_rank: list[dict[str, Any]]) -> None:
    """Weights and norms are equal on ranks that began with different ones; both skip what overflows on one.

    In native AMP, in one format for everything, and with 32-bit master weights. The largest gradient, in true
    size, is what clipping by the infinity norm leaves.
    """
    one, other = (seen[name] for seen in by_rank)
    assert torch.equal(one["weights"], other["weights"])
    assert one["weights"].isfinite().all()
    skipped = [step == BAD_STEP and name in ("16-mixed", "16-master") for step in range(5)]
    assert one["skipped"] == other["skipped"] == skipped
    good = [step for step in range(5) if not skipped[step]]
    assert [one["norms"][step] for step in good] == [other["norms"][step] for step in good]
    for seen in (one, other):
        assert max(seen["largest"][step] for step in good) == pytest.approx(LIMIT, rel=1e-3)


class WithoutLearning(Precision):
    """Sets every learning rate to 0, once module and optimizers are there."""

    def configure(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        optimizers[0].param_groups[0]["lr"] = 0.0


@pytest.mark.quick
def test_configure_apex_is_precision_configure() -> None:
    """An override of `Precision.configure` changes module and optimizers on every rank."""
    trainer, module = trainer_on(2, max_epochs=1, plugins=[WithoutLearning()]), Regression()
    trainer.fit(module, loader(24, 4))
    assert trainer.global_step == 3

    torch.testing.assert_close([*module.parameters()], [*Regression().parameters()], rtol=0, atol=0)


def test_gradients_that_differ_are_agreed() -> None:
    """Where gradients stay on their rank, as between the averagings of post-local SGD, they agree to skip."""
    strategy = ddp("fork", comm_hook=noop_hook)
    strategy.launch(train, "16-mixed")
    first, second = (strategy.results[rank] for rank in range(2))
    assert not torch.equal(first["weights"], second["weights"])
    assert first["skipped"] == second["skipped"] == [step == BAD_STEP for step in range(5)]


class Spoilt(Regression):
    """The loss of one rank becomes NaN in one batch; counts the batches whose step changed the weights."""

    moved = 0
    before: Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.before = next(self.net.parameters()).detach().clone()
        return loss * float("nan") if batch_idx == 1 and self.global_rank == 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moved += not torch.equal(self.before, next(self.net.parameters()))


@pytest.mark.quick
def test_nan_on_one_rank_raises_on_all() -> None:
    """`on_nonfinite="raise"` ends the job with the step and the rank whose loss it was."""
    text = r"NonFiniteLossError: .*batch 1\): on global_rank 1 of 2"
    with pytest.raises(WorkerRaisedError, match=text) as caught:
        trainer_on(2, max_epochs=1, on_nonfinite="raise").fit(Spoilt(), loader(24, 4))
    assert caught.value.exception_type.endswith("NonFiniteLossError")


def test_nan_on_one_rank_is_skipped_on_all() -> None:
    """`on_nonfinite="skip"`: the weights of both ranks move in every step but that one."""
    trainer, module = trainer_on(2, max_epochs=1, on_nonfinite="skip"), Spoilt()
    trainer.fit(module, loader(24, 4))
    assert (trainer.global_step, module.moved) == (3, 2)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


COUNTED = ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")


def test_judging_costs_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `on_nonfinite` a healthy run calls as many collectives as without."""
    calls: list[str] = []
    count_calls(monkeypatch, calls, *COUNTED)
    found: list[Any] = []
    counting = LambdaCallback(on_train_end=lambda _, module: module.hparams.update(calls=len(calls)))
    for policy in (None, "raise"):
        module = Regression()
        trainer_on(2, max_epochs=2, on_nonfinite=policy, callbacks=counting).fit(module, loader(24, 4))
        found.append(module.hparams["calls"])
    assert found[0] == found[1] > 0


def test_scale_comes_back_and_goes_on() -> None:
    """After a fit in other processes the caller has the loss scale's state, and the next fit uses it."""
    precision = MixedPrecision("16-mixed", init_scale=64.0)
    trainer, module = trainer_on(2, max_epochs=1, plugins=[precision]), Regression()
    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(module, loader(24, 4))
        state = precision.state_dict()["scaler"]
        assert (state["scale"], state["_growth_tracker"]) == (64.0, 3 * epochs)

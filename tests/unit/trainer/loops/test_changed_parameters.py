"""Layers that callbacks and steps freeze, unfreeze and add within a fit, on ranks that are threads."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import SingleDeviceStrategy, TrainingModule
from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError, RankMismatchError, UnusedParametersError
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import FEATURES, Sums, fit_on_ranks


class Layers(TrainingModule):
    """Three layers, of which the first is frozen, and a scale that is not registered."""

    def __init__(self, optimizes_by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not optimizes_by_hand
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(FEATURES, 4).double()
        self.second = nn.Linear(4, 4).double()
        self.last = nn.Linear(4, 1).double()
        self.extra: nn.Module | None = None
        self.scale = [nn.Parameter(torch.ones((), dtype=torch.float64))]
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        [samples] = batch
        if self.trainer.strategy.gradient_weighting == "logged" and self.automatic_optimization:
            self.log_weight(len(samples))
        hidden = torch.tanh(self.second(torch.tanh(self.first(samples))))
        extra = 0.0 if self.extra is None else self.extra(samples)
        errors = self.last(hidden) * self.scale[0] + extra - samples.sum(dim=1, keepdim=True)
        loss: Tensor = errors.square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        is_weighted = self.trainer.strategy.gradient_weighting == "logged"
        self.manual_backward(loss, **({"weight": len(samples)} if is_weighted else {}))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class At(Callback):
    """Changes the module at a batch of an epoch, in a hook."""

    def __init__(self, change: Callable[[Any, Any], None], epoch: int, batch: int, hook: str) -> None:
        self.change, self.moment, self.hook = change, (epoch, batch), hook

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.run("on_train_start", trainer, module, 0)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.run("on_train_epoch_start", trainer, module, 0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.run("on_train_batch_start", trainer, module, batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run("on_train_batch_end", trainer, module, batch_idx)

    def run(self, hook: str, trainer: Any, module: Any, batch_idx: int) -> None:
        if hook == self.hook and (trainer.current_epoch, batch_idx) == self.moment:
            self.change(trainer, module)


def unfreeze(trainer: Any, module: Layers) -> None:
    """Unfreeze the first layer, which the optimizer has."""
    module.first.requires_grad_(True)


def freeze(trainer: Any, module: Layers) -> None:
    """Freeze a layer."""
    module.second.requires_grad_(False)


def add_layer(trainer: Any, module: Layers) -> None:
    """Add a layer, with values that no other rank draws, and train it."""
    rank = 0 if trainer.world_size == 1 else trainer.global_rank
    module.extra = nn.Linear(FEATURES, 1).double()
    for parameter in module.extra.parameters():
        nn.init.constant_(parameter, 0.3 + rank)
    trainer.optimizers[0].add_param_group({"params": list(module.extra.parameters()), "lr": 0.05})


def train_scale(trainer: Any, module: Layers) -> None:
    """Train a parameter that is not in the module."""
    if trainer.global_rank:
        module.scale[0].data.fill_(5.0)  # every rank begins with rank 0's
    trainer.optimizers[0].add_param_group({"params": module.scale})


def fit(world_size: int, module: Layers, callback: Callback | None, strategy: Any, **options: Any) -> Any:
    """Fit on 23 samples for each epoch; return the weights."""
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(23, FEATURES, dtype=torch.float64, generator=generator))
    callbacks = [] if callback is None else [callback]
    trainer = quiet_trainer(strategy, world_size, max_epochs=3, callbacks=callbacks, **options)
    trainer.fit(module, DataLoader(data, batch_size=6 // world_size))
    return [each.detach().clone() for each in (*module.parameters(), *module.scale)]


def check(
    change: Any, moment: tuple[int, int, str], by_hand: bool = False, accumulate: int = 1, **arguments: Any
) -> None:
    """Two ranks have one process's weights."""
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    callbacks = [At(change, *moment) for _ in range(3)]
    modules = [Layers(by_hand) for _ in range(3)]
    single = SingleDeviceStrategy(gradient_weighting="samples")
    wanted = fit(1, modules[2], callbacks[2], single, **options)

    def run(rank: int) -> Any:
        strategy = ThreadedStrategy(rank, 2, **arguments)
        return fit(2, modules[rank], callbacks[rank], strategy, uneven_inputs="join", **options)

    for own in run_ranks(2, run):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


CHANGES = {"unfreeze": unfreeze, "freeze": freeze, "add a layer": add_layer, "train a scale": train_scale}
MOMENTS = [
    (0, 0, "on_train_start"),
    (1, 0, "on_train_epoch_start"),
    (1, 1, "on_train_batch_start"),
    (1, 3, "on_train_batch_end"),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment[2])
@pytest.mark.parametrize("change", CHANGES)
def test_automatic_optimization(change: str, moment: tuple[int, int, str]) -> None:
    """All that callbacks change is averaged from then on, also within a window."""
    check(CHANGES[change], moment, accumulate=2, gradient_weighting="samples")


@pytest.mark.parametrize(
    "arguments", [{}, {"find_unused_parameters": True}, {"sync_mode": "forced_sync"}, {"static_graph": True}]
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True found")
@pytest.mark.parametrize("change", CHANGES)
def test_logged_weights(change: str, arguments: dict[str, Any]) -> None:
    """So it is with logged weights, however gradients are averaged."""
    check(CHANGES[change], MOMENTS[2], gradient_weighting="logged", **arguments)


@pytest.mark.parametrize("weighting", ["samples", "logged"])
@pytest.mark.parametrize("change", CHANGES)
def test_manual_optimization(change: str, weighting: str) -> None:
    """So it is where the module optimises by hand."""
    check(CHANGES[change], MOMENTS[2], by_hand=True, gradient_weighting=weighting)


class InItsStep(Layers):
    """Changes something in `training_step` itself."""

    change: Callable[[Any, Any], None]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.current_epoch == 1 and batch_idx == 1:
            self.change(self.trainer, self)
        return super().training_step(batch, batch_idx)


def in_the_step(change: Any, by_hand: bool = False) -> list[Any]:
    """Return the weights of one process and of two ranks."""
    modules = [InItsStep(by_hand) for _ in range(3)]
    for module in modules:
        module.change = change

    def run(rank: int) -> Any:
        strategy = ThreadedStrategy(rank, 2, gradient_weighting="samples")
        return fit(2, modules[rank], None, strategy, uneven_inputs="join")

    return [fit(1, modules[2], None, "single_device"), *run_ranks(2, run)]


@pytest.mark.parametrize("by_hand", [False, True])
def test_unfrozen_in_the_step(by_hand: bool) -> None:
    """What a step unfreezes is averaged in that step already."""
    alone, *of_ranks = in_the_step(unfreeze, by_hand)
    for own in of_ranks:
        torch.testing.assert_close(own, alone, rtol=0, atol=1e-12)


def test_frozen_in_the_step() -> None:
    """What a step freezes is missing in that step: an error, as DDP waits for it."""
    with pytest.raises(UnusedParametersError, match=r"second\.weight"):
        in_the_step(freeze)


def test_the_whole_module_is_frozen() -> None:
    """DDP cannot average nothing: an error on every rank, before the step."""
    modules = [Layers() for _ in range(2)]

    def freeze_all(trainer: Any, module: Layers) -> None:
        module.requires_grad_(False)

    def run(rank: int) -> None:
        with pytest.raises(ConfigurationError, match="Layers has nothing left to train"):
            fit(2, modules[rank], At(freeze_all, 0, 1, "on_train_batch_start"), ThreadedStrategy(rank, 2))

    run_ranks(2, run)


class Online(Callback):
    """Trains a layer of the module with an optimizer of its own, by the features of each batch.

    It is added in `on_fit_start`, unless the module has it already.
    """

    def __init__(self, *, has_wrapper: bool) -> None:
        self.has_wrapper = has_wrapper

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if not hasattr(module, "probe"):
            module.probe = nn.Linear(4, 1).double()
            for parameter in module.probe.parameters():
                nn.init.constant_(parameter, 0.3)
        self.optimizer = torch.optim.SGD(module.probe.parameters(), lr=0.1, momentum=0.9)
        self.probe = trainer.strategy.setup_module(module.probe) if self.has_wrapper else module.probe

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        [samples] = batch
        features = torch.tanh(module.first(samples)).detach()
        (self.probe(features) - samples.sum(dim=1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        del self.probe


def fit_online(callback: Callback, module: Any, strategy: Any, world_size: int, **options: Any) -> Any:
    """Fit on 24 samples for each epoch; return the weights."""
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(24, FEATURES, dtype=torch.float64, generator=generator))
    trainer = quiet_trainer(strategy, world_size, max_epochs=2, callbacks=[callback], **options)
    trainer.fit(module, DataLoader(data, batch_size=6 // world_size))
    return [each.detach().clone() for each in module.parameters()]


MODES: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"sync_mode": "forced_sync"}]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True found")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("arguments", [*MODES, {"gradient_weighting": "samples"}])
def test_a_layer_that_a_callback_trains(arguments: dict[str, Any], by_hand: bool) -> None:
    """It is added in on_fit_start; with a wrapper of its own it has one process's weights."""
    wanted = fit_online(Online(has_wrapper=True), Layers(by_hand), "single_device", 1)

    def run(rank: int) -> Any:
        strategy = ThreadedStrategy(rank, 2, **arguments)
        return fit_online(Online(has_wrapper=True), Layers(by_hand), strategy, 2)

    for own in run_ranks(2, run):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("arguments", MODES)
def test_a_layer_that_ranks_train_apart(arguments: dict[str, Any], by_hand: bool) -> None:
    """Without a wrapper each rank trains it on its own batches: an error that names it, and the wrapper."""

    def run(rank: int) -> None:
        with pytest.raises(RankMismatchError, match=r"'probe\.weight', which is in no optimizer") as caught:
            fit_online(Online(has_wrapper=False), Layers(by_hand), ThreadedStrategy(rank, 2, **arguments), 2)
        assert "trainer.strategy.setup_module(module.layer) in on_fit_start" in str(caught.value)

    run_ranks(2, run)


class WithProbe(Layers):
    """Has the callback's layer from the start, so DDP waits for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(4, 1).double()


@pytest.mark.parametrize("arguments", MODES[:2])
def test_a_layer_that_ddp_waits_for(arguments: dict[str, Any]) -> None:
    """The error names the layer, and the hook that may add it, also where DDP looks for unused layers."""

    def run(rank: int) -> None:
        with pytest.raises(UnusedParametersError, match=r"'probe\.weight'") as caught:
            fit_online(Online(has_wrapper=True), WithProbe(), ThreadedStrategy(rank, 2, **arguments), 2)
        assert "is added to the module in on_fit_start" in str(caught.value)

    run_ranks(2, run)


class Copied(Callback):
    """Keeps a copy of a layer in the module, in a hook after it was wrapped, and averages weights into it."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.teacher = copy.deepcopy(module.last)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for own, trained in zip(module.teacher.parameters(), module.last.parameters(), strict=True):
                own.lerp_(trained, 0.5)


@pytest.mark.parametrize("arguments", [{}, {"gradient_weighting": "logged"}])
def test_a_layer_that_nothing_trains(arguments: dict[str, Any]) -> None:
    """A copy of a layer is not waited for, though it could be trained."""
    single = SingleDeviceStrategy(**arguments)
    wanted = fit_online(Copied(), Layers(), single, 1)

    def run(rank: int) -> Any:
        return fit_online(Copied(), Layers(), ThreadedStrategy(rank, 2, **arguments), 2)

    for own in run_ranks(2, run):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


class Centered(Sums):
    """Registers its first buffer in a step, with the mean of the rank's own batch, and records its values."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__(by_hand=by_hand)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mean = batch[0].mean(dim=0)
        if "center" in self._buffers:
            self.seen.append(self.get_buffer("center").tolist())
            self.center = (self.get_buffer("center") + mean) / 2
        else:
            self.register_buffer("center", mean)
        return super().training_step(batch, batch_idx)


def centers(by_hand: bool, ddp_kwargs: dict[str, Any]) -> list[Any]:
    """Train for four steps on two ranks; return what each has seen at the beginning of the last three."""
    modules = [Centered(by_hand=by_hand) for _ in range(2)]
    data = torch.randn(8, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fit_on_ranks(modules, DataLoader(TensorDataset(data), batch_size=1), ddp_kwargs)
    return [module.seen for module in modules]


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_first_buffer_is_registered_late(by_hand: bool) -> None:
    """Every rank has rank 0's values of it from the next step on, as of any other buffer."""
    first, second = centers(by_hand, {})
    assert len(first) == 3
    assert first == second


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")  # new in torch 2.13
def test_a_late_buffer_that_is_not_broadcast() -> None:
    """Where DDP is configured not to, each rank keeps its own."""
    first, second = centers(False, {"broadcast_buffers": False})
    assert all(one != other for one, other in zip(first, second, strict=True))

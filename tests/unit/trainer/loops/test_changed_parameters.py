"""Layers that callbacks and steps freeze, unfreeze and add within a fit, on ranks that are threads."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.callbacks import Callback, LambdaCallback
from rankwise.errors import ConfigurationError, RankMismatchError, UnusedParametersError
from tests.helpers.parameters import first, in_turn
from tests.unit.gradient_sync.helpers import (
    Layers,
    Sums,
    batch,
    fit_alone,
    fit_on_ranks,
    loss_of,
    refused_on_ranks,
    step_by_hand,
)


class Trained(Layers, TrainingModule):
    """Layers of which the first is frozen."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__("first")
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        [samples] = batch
        loss, is_weighted = loss_of(self, samples), self.trainer.strategy.gradient_weighting == "logged"
        if not self.automatic_optimization:
            step_by_hand(self, loss, **({"weight": len(samples)} if is_weighted else {}))
            return None
        if is_weighted:
            self.log_weight(len(samples))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def at(change: Callable[[Any, Any], None], epoch: int, batch: int, hook: str) -> Callback:
    """Return a callback that changes the module at a batch of an epoch, in a hook."""

    def run(trainer: Any, module: Any, *arguments: Any) -> None:
        batch_idx = arguments[-1] if arguments else 0
        if (trainer.current_epoch, batch_idx) == (epoch, batch):
            change(trainer, module)

    return LambdaCallback(**{hook: run})


def unfreeze(trainer: Any, module: Layers) -> None:
    """Unfreeze the first layer, which the optimizer has."""
    module.first.requires_grad_(True)


def freeze(trainer: Any, module: Layers) -> None:
    """Freeze a layer."""
    module.second.requires_grad_(False)


def add_layer(trainer: Any, module: Layers) -> None:
    """Add a layer, with values that no other rank draws, and train it."""
    layer = module.add_layer(0 if trainer.world_size == 1 else trainer.global_rank)
    trainer.optimizers[0].add_param_group({"params": list(layer.parameters()), "lr": 0.05})


def train_scale(trainer: Any, module: Layers) -> None:
    """Train a parameter that is not in the module."""
    if trainer.global_rank:
        module.scale[0].data.fill_(5.0)  # every rank begins with rank 0's
    trainer.optimizers[0].add_param_group({"params": module.scale})


def data(count: int, ranks: int) -> DataLoader[Any]:
    """Return a loader of so many samples, of which six are a global batch."""
    return DataLoader(TensorDataset(batch(0, 0, count)), batch_size=6 // ranks)


def check(
    make: Callable[[], Trained], callback: Callback | None, options: Any, count: int = 23, **more: Any
) -> None:
    """Two ranks have one process's weights."""
    more = {"max_epochs": 3, "uneven_inputs": "join", "callbacks": callback, **more}
    alone, *modules = make(), make(), make()
    fit_alone(alone, data(count, 1), "samples", **more)
    fit_on_ranks(modules, data(count, 2), options, **more)
    for module in modules:
        torch.testing.assert_close(module.values(), alone.values(), rtol=0, atol=1e-12)


CHANGES = {"unfreeze": unfreeze, "freeze": freeze, "add a layer": add_layer, "train a scale": train_scale}
MOMENTS = [
    (0, 0, "on_train_start"),
    (1, 0, "on_train_epoch_start"),
    (1, 1, "on_train_batch_start"),
    (1, 3, "on_train_batch_end"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "moment"), first(4, in_turn(CHANGES, MOMENTS) + in_turn(CHANGES, MOMENTS, 1))
)
def test_automatic_optimization(change: str, moment: tuple[int, int, str]) -> None:
    """All that callbacks change is averaged from then on, also within a window."""
    options = {"gradient_weighting": "samples"}
    check(Trained, at(CHANGES[change], *moment), options, accumulate_grad_batches=2)


MODES: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"sync_mode": "forced_sync"}]


WAYS = [*MODES, {"static_graph": True}]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True found")
@pytest.mark.parametrize(("change", "options"), first(4, in_turn(CHANGES, WAYS) + in_turn(CHANGES, WAYS, 2)))
def test_logged_weights(change: str, options: dict[str, Any]) -> None:
    """So it is with logged weights, however gradients are averaged."""
    check(Trained, at(CHANGES[change], *MOMENTS[2]), {"gradient_weighting": "logged", **options})


@pytest.mark.full
@pytest.mark.parametrize("weighting", ["samples", "logged"])
@pytest.mark.parametrize("change", CHANGES)
def test_manual_optimization(change: str, weighting: str) -> None:
    """So it is where the module optimises by hand."""
    options = {"gradient_weighting": weighting}
    check(lambda: Trained(by_hand=True), at(CHANGES[change], *MOMENTS[2]), options)


class InItsStep(Trained):
    """Freezes or unfreezes a layer in `training_step` itself."""

    def __init__(self, change: Callable[[Any, Any], None], by_hand: bool = False) -> None:
        super().__init__(by_hand)
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.current_epoch == 1 and batch_idx == 1:
            self.change(self.trainer, self)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("by_hand", [False, True])
def test_unfrozen_in_the_step(by_hand: bool) -> None:
    """What a step unfreezes is averaged in that step already."""
    check(lambda: InItsStep(unfreeze, by_hand), None, {"gradient_weighting": "samples"})


def test_frozen_in_the_step() -> None:
    """What a step freezes is missing in that step: an error, as DDP waits for it."""
    with pytest.raises(UnusedParametersError, match=r"second\.weight"):
        check(lambda: InItsStep(freeze), None, {"gradient_weighting": "samples"})


def test_the_whole_module_is_frozen() -> None:
    """DDP cannot average nothing: an error on every rank, before the step."""
    freeze_all = at(lambda _, module: module.requires_grad_(False), 0, 1, "on_train_batch_start")
    words = "Trained has nothing left to train"
    refused_on_ranks(ConfigurationError, words, [Trained(), Trained()], data(23, 2), callbacks=freeze_all)


EVEN: dict[str, Any] = {"count": 24, "max_epochs": 2, "uneven_inputs": "error"}


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


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True found")
@pytest.mark.parametrize(
    ("options", "by_hand"), in_turn([*MODES, {"gradient_weighting": "samples"}, *MODES[1:]], [False, True])
)
def test_a_layer_that_a_callback_trains(options: dict[str, Any], by_hand: bool) -> None:
    """It is added in on_fit_start; with a wrapper of its own it has one process's weights."""
    check(lambda: Trained(by_hand), Online(has_wrapper=True), options, **EVEN)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("options", MODES)
def test_a_layer_that_ranks_train_apart(options: dict[str, Any], by_hand: bool) -> None:
    """Without a wrapper each rank trains it on its own batches: an error that names it, and the wrapper."""
    words, modules = r"'probe\.weight', which is in no optimizer", [Trained(by_hand) for _ in range(2)]
    callback = Online(has_wrapper=False)
    text = refused_on_ranks(RankMismatchError, words, modules, data(24, 2), options, callbacks=callback)
    assert "trainer.strategy.setup_module(module.layer) in on_fit_start" in text


@pytest.mark.parametrize("options", MODES[:2])
def test_a_layer_that_ddp_waits_for(options: dict[str, Any]) -> None:
    """The error names the layer, and the hook that may add it, also where DDP looks for unused layers."""
    words, modules, callback = r"'probe\.weight'", [Trained(), Trained()], Online(has_wrapper=True)
    for module in modules:
        module.probe = nn.Linear(4, 1).double()  # from the start, so DDP waits for its gradients
    text = refused_on_ranks(UnusedParametersError, words, modules, data(24, 2), options, callbacks=callback)
    assert "is added to the module in on_fit_start" in text


class Averaging(Callback):
    """Averages the weights of a layer into a copy, which the module has from a hook after it was wrapped."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.teacher = copy.deepcopy(module.last)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        for own, trained in zip(module.teacher.parameters(), module.last.parameters(), strict=True):
            own.lerp_(trained, 0.5)


@pytest.mark.parametrize("options", [{}, {"gradient_weighting": "logged"}])
def test_a_layer_that_nothing_trains(options: dict[str, Any]) -> None:
    """A copy of a layer is not waited for, though it could be trained."""
    check(Trained, Averaging(), options, **EVEN)


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
    fit_on_ranks(modules, data(24, 2), ddp_kwargs)
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

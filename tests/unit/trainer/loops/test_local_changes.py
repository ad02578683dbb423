"""What changes parameters or gradients by a rank's own batch, before the average: most of it is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from rankwise.errors import ConfigurationError, RankMismatchError
from rankwise.gradient_sync.tensor_hooks import call_hooks, hooks_kept
from tests.helpers.raising import raises
from tests.unit.gradient_sync.helpers import FEATURES, Sums, assert_each, fit_alone, fit_on_ranks

BATCH = 12
DATA = torch.randn(4 * BATCH, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.05, 0.05)


def fit(make: Callable[[], Sums], ranks: int, options: Any = None, **arguments: Any) -> Tensor:
    """Train for an epoch on all data; return the weights."""
    data = DataLoader(TensorDataset(DATA), batch_size=BATCH // ranks)
    if ranks == 1:
        return fit_alone(make(), data, **arguments)
    return fit_on_ranks([make() for _ in range(ranks)], data, options, **arguments)[0]


def check(make: Callable[[], Sums], ranks: int, options: Any = None, **arguments: Any) -> None:
    """Several ranks have one process's weights."""
    assert_each([fit(make, ranks, options, **arguments)], fit(make, 1, **arguments))


class Limited(Sums):
    """Has embeddings with max_norm, from the beginning or from the first epoch on."""

    def __init__(self, kind: Any = nn.Embedding, *, is_late: bool = False) -> None:
        super().__init__()
        self.kind, self.is_late = kind, is_late
        if not is_late:
            self.add()

    def add(self) -> None:
        self.rows = self.kind(BATCH, FEATURES, max_norm=1.0).double()

    def on_train_epoch_start(self) -> None:
        if self.is_late:
            self.add()


@pytest.mark.parametrize("make", [Limited, partial(Limited, nn.EmbeddingBag), partial(Limited, is_late=True)])
def test_embeddings_with_max_norm(make: Callable[[], Limited]) -> None:
    """The forward pass changes the rows of the rank's own batch: refused on several ranks, by name."""
    raises(ConfigurationError, r"max_norm of an embedding(?s:.*) rows(?s:.*)torch\.renorm", fit, make, 2)
    assert fit(Limited, 1).numel()  # one process may have them


class Accumulating(Sums):
    """Steps in the backward pass, as a recipe of torch's shows."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    @torch.no_grad()
    def step(self, parameter: Any) -> None:
        parameter.add_(parameter.grad, alpha=-0.1)


def test_a_step_in_the_backward_pass() -> None:
    """It uses the rank's own gradient: refused on several ranks, by name."""
    raises(ConfigurationError, r"register_post_accumulate(?s:.*)net\.0\.weight", fit, Accumulating, 3)
    assert fit(Accumulating, 1).numel()


class Hooked(Sums):
    """Has a tensor hook on each parameter, which is a row of `HOOKS`."""

    def __init__(self, name: str, *, by_hand: bool = False) -> None:
        super().__init__(by_hand=by_hand)
        self.seen: list[float] = []
        for parameter in self.parameters():
            parameter.register_hook(partial(HOOKS[name], self))

    def read(self, gradient: Tensor) -> None:
        self.seen.append(float(gradient.norm()))


HOOKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "mask": lambda module, gradient: gradient * 0.5,
    "clamp": lambda module, gradient: clamp(gradient),
    "clamp_": lambda module, gradient: gradient.clamp_(-0.05, 0.05),
    "sign": lambda module, gradient: None if gradient.ndim == 1 else gradient.sign(),
    "read": lambda module, gradient: module.read(gradient),
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_tensor_hooks(name: str, by_hand: bool) -> None:
    """They get averaged gradients, so any hook gives the weights of one process."""
    check(partial(Hooked, name, by_hand=by_hand), 3)


@pytest.mark.parametrize("options", [{"sync_mode": "forced_sync"}, {"gradient_weighting": "samples"}])
def test_tensor_hooks_of_other_averages(options: Any) -> None:
    """The same with each way in which gradients are averaged."""
    check(partial(Hooked, "clamp"), 2, options)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mask", "clamp", "clamp_"])
@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_tensor_hooks_before_the_average(name: str, mode: str) -> None:
    """A change of what is added to gradients of earlier batches is refused, by the parameter's name."""
    with pytest.raises(ConfigurationError, match=r"'net\.[02]\.(weight|bias)' has changed a gradient"):
        fit(partial(Hooked, name), 2, {"sync_mode": mode}, accumulate_grad_batches=2)


def test_tensor_hooks_that_read() -> None:
    """They may read each batch's gradient, and can be removed while they are kept."""
    check(partial(Hooked, "read"), 2, accumulate_grad_batches=2)
    module = Sums()
    calls: list[Tensor] = []
    handles = [parameter.register_hook(calls.append) for parameter in module.parameters()]
    with hooks_kept([*module.parameters()], module, is_averaged=True) as kept:
        handles[0].remove()
        module.loss([DATA]).backward()
        assert calls == []
    call_hooks(kept, nullcontext)
    assert [each.shape for each in calls] == [each.shape for each in [*module.parameters()][:0:-1]]
    module.loss([DATA]).backward()
    assert len(calls) == 6


def test_a_tensor_hook_that_returns_another_shape() -> None:
    """It is an error on any number of ranks, as torch's own of one."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"returned \(\) for a gradient of \(3,\)"):
        call_hooks([(parameter, Tensor.sum)], nullcontext)


class HookedInForward(Sums):
    """Registers a hook in each forward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        [*self.parameters()][-1].register_hook(clamp)
        return self.loss(batch)


def test_tensor_hooks_of_a_forward_pass() -> None:
    """They would get the gradient of the rank's own batch: refused on several ranks, by name."""
    with pytest.raises(ConfigurationError, match=r"registered a tensor hook of parameter 'net\.2\.bias'"):
        fit(HookedInForward, 2)
    assert fit(HookedInForward, 1).numel()


class ClampedAfterBackward(Sums):
    """Changes gradients after each backward pass."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.05, 0.05)


class ReadAfterBackward(Sums):
    """Reads gradients after each backward pass."""

    def on_after_backward(self) -> None:
        self.norm = sum(float(each.grad.norm()) for each in self.parameters() if each.grad is not None)


@pytest.mark.parametrize("mode", ["single_auto_sync", "forced_sync"])
def test_changed_before_they_are_averaged(mode: str) -> None:
    """A change after the first backward pass of a window is refused, by name; reading is not."""
    options = {"sync_mode": mode}
    with pytest.raises(ConfigurationError, match=r"on_after_backward has changed(?s:.*)multi_auto_sync"):
        fit(ClampedAfterBackward, 2, options, accumulate_grad_batches=2)
    check(ReadAfterBackward, 2, options, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("mode", "accumulate", "ranks"), [("multi_auto_sync", 2, 3), ("auto", 1, 2), ("forced_sync", 1, 3)]
)
def test_changed_after_they_are_averaged(mode: str, accumulate: int, ranks: int) -> None:
    """Any change of averaged gradients gives the weights of one process."""
    check(ClampedAfterBackward, ranks, {"sync_mode": mode}, accumulate_grad_batches=accumulate)


class ClampedByHand(ClampedAfterBackward):
    """Accumulates two backward passes in manual optimisation."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with self.no_backward_sync():
            self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_changed_in_a_block_without_averages() -> None:
    """The same in manual optimisation."""
    with pytest.raises(ConfigurationError, match=r"on_after_backward has changed(?s:.*)no_backward_sync"):
        fit(partial(ClampedByHand, by_hand=True), 2)


class Lazy(Sums):
    """Has a layer without a shape, until a batch runs through it in `setup`."""

    def __init__(self, *, runs_first: bool = False) -> None:
        super().__init__()
        self.runs_first = runs_first
        self.net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)).double()

    def setup(self, stage: str) -> None:
        if self.runs_first:
            self.net(torch.zeros(1, FEATURES, dtype=torch.float64))


def test_lazy_parameters() -> None:
    """They are named, with the way out, which works."""
    raises(ConfigurationError, r"lazy(?s:.*)net\.0\.weight(?s:.*)dummy batch", fit, Lazy, 2)
    modules = [Lazy(runs_first=True) for _ in range(2)]
    fit(iter(modules).__next__, 2)
    assert [tuple(each.shape) for each in modules[0].parameters()] == [(4, FEATURES), (4,), (1, 4), (1,)]


class Checkpointed(Sums):
    """Uses a parameter inside and outside of reentrant activation checkpointing."""

    is_reentrant = True  # a backward pass in the backward pass

    def loss(self, batch: Any) -> Tensor:
        bias: Any = self.net.get_parameter("0.bias")
        inside = checkpoint(self.net, batch[0] * bias.mean().exp(), use_reentrant=self.is_reentrant)
        loss: Tensor = (inside - batch[0].sum(dim=1, keepdim=True)).square().mean()
        return loss


@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync"])
def test_reentrant_checkpointing(mode: str) -> None:
    """DDP averages the parameter's gradient before all of it is there: the comparison of ranks finds it."""
    raises(RankMismatchError, r"net\.0\.bias", fit, Checkpointed, 2, {"sync_mode": mode})


class CheckpointedOnce(Checkpointed):
    """The same without that."""

    is_reentrant = False


@pytest.mark.parametrize(
    ("make", "mode", "ranks"), [(Checkpointed, "forced_sync", 3), (CheckpointedOnce, "auto", 2)]
)
def test_checkpointing_that_is_exact(make: type[Checkpointed], mode: str, ranks: int) -> None:
    """Averages after the backward pass are right, and so is checkpointing that is not reentrant."""
    check(make, ranks, {"sync_mode": mode})

"""Logged weights: large ones, and batches of weight 0, whose loss may be NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankwise.errors import NonFiniteLossError
from tests.helpers.parameters import first
from tests.unit.gradient_sync.helpers import Sums, assert_each, batch, fit_alone, fit_on_ranks, step_by_hand

WINDOW = 2


# ------------------------------------------------------------------------ large weights


class Weighed(Sums):
    """Has weights of 0 to 2, times `size`."""

    def __init__(self, size: float, *, by_hand: bool = False) -> None:
        super().__init__(by_hand=by_hand)
        self.net.float()
        self.size = size

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight, loss = self.size * ((batch_idx + self.global_rank) % 3), self.loss(batch)
        if not self.automatic_optimization:
            return step_by_hand(self, loss, weight=weight)
        self.log_weight(weight)
        return loss


SAMPLES = DataLoader(TensorDataset(batch(0, 0, 16).float()), batch_size=1)


def fit(module: Weighed, precision: str) -> Tensor:
    """Fit one process in a precision, where any overflow raises; return the weights."""
    options: dict[str, Any] = {"on_nonfinite": "raise", "accumulate_grad_batches": WINDOW}
    return fit_alone(module, SAMPLES, "logged", precision=precision, **options)


def fit_on_two(size: float, by_hand: bool, precision: str, mode: str) -> Tensor:
    first, second = fit_on_ranks(
        [Weighed(size, by_hand=by_hand) for _ in range(2)],
        SAMPLES,
        {"gradient_weighting": "logged", "sync_mode": mode},
        precision=precision,
        on_nonfinite="raise",
        accumulate_grad_batches=1 if by_hand else WINDOW,
    )
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("precision", ["16-true", "16-master"])
def test_one_process(precision: str) -> None:
    """A million times the weights give the same model, to the bit."""
    expected = fit(Weighed(1), precision)
    assert torch.equal(fit(Weighed(2.0**20), precision), expected)
    assert expected.isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize(("by_hand", "mode"), [(False, "auto"), (False, "forced_sync"), (True, "auto")])
@pytest.mark.parametrize("precision", ["16-true", "16-master"])
def test_two_ranks(by_hand: bool, mode: str, precision: str) -> None:
    """The same on two ranks, in every way of averaging gradients."""
    expected = fit_on_two(1, by_hand, precision, mode)
    assert torch.equal(fit_on_two(2.0**20, by_hand, precision, mode), expected)
    assert expected.isfinite().all()


def test_weights_that_grow() -> None:
    """The unit follows the weights."""

    class Growing(Weighed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_weight(4.0 ** (batch_idx // WINDOW * 2))
            return loss

    assert fit(Growing(1), "16-true").isfinite().all()


def test_overflow_by_a_weight() -> None:
    """An overflow from a weight much larger than the others is not reported as a rank's loss."""

    class Sudden(Weighed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_weight(1.0 if batch_idx < WINDOW else 1e30)
            return loss

    with pytest.raises(NonFiniteLossError, match="though every rank's loss is finite"):
        fit(Sudden(1), "16-true")


# ------------------------------------------------------------------------ batches of weight 0


class Tokens(Sums):
    """A mean over the samples that count; over none it is NaN, or 0 if `at_least` says so."""

    def __init__(self, at_least: float, *, by_hand: bool = False) -> None:
        super().__init__(by_hand=by_hand)
        self.at_least = at_least

    def loss(self, batch: list[Tensor]) -> Tensor:
        samples, counts = batch
        errors = (self.net(samples) - samples.sum(dim=1, keepdim=True)).square().squeeze(1)
        loss: Tensor = (errors * counts).sum() / counts.sum().clamp_min(self.at_least)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss(batch), batch[1].sum()
        if self.automatic_optimization:
            return {"loss": loss, "weight": weight}
        return step_by_hand(self, loss, weight=weight)


def fitted(
    at_least: float, policy: str | None, by_hand: bool = False, mode: str = "auto", window: int = 1
) -> Tensor:
    """Fit on two ranks, the second of which has batches in which nothing counts; return the weights."""
    counts = torch.ones(12, dtype=torch.float64)
    counts[[1, 3, 9]] = 0  # of rank 1: its first batch, and a half of its third
    first, second = fit_on_ranks(
        [Tokens(at_least, by_hand=by_hand) for _ in range(2)],
        DataLoader(TensorDataset(batch(0, 0, 12), counts), batch_size=2),
        {"gradient_weighting": "logged", "sync_mode": mode},
        on_nonfinite=policy,
        accumulate_grad_batches=window,
    )
    assert torch.equal(first, second)
    return first


@pytest.mark.full
@pytest.mark.parametrize(
    ("by_hand", "mode", "window"),
    [(False, "auto", 1), (False, "auto", 2), (False, "forced_sync", 1), (True, "auto", 1)],
)
@pytest.mark.parametrize("policy", first(2, [None, "skip", "raise"]))
def test_mean_over_nothing(by_hand: bool, mode: str, window: int, policy: str | None) -> None:
    """A NaN loss of weight 0 acts like a loss of 0: no rank raises or skips, and the weights are the same."""
    expected = fitted(1, policy, by_hand, mode, window)
    assert torch.equal(fitted(0, policy, by_hand, mode, window), expected)
    assert expected.isfinite().all()


class NaNInPadding(Tokens):
    """Returns a NaN loss in padding steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        is_repeated = bool(self.previous is batch[0]) if batch_idx else False
        self.previous: Tensor = batch[0]
        return loss * float("nan") if is_repeated else loss


def test_padding_step() -> None:
    """A repeated batch has no effect, even if its loss is NaN."""
    samples = TensorDataset(batch(0, 0, 5), torch.ones(5, dtype=torch.float64))
    loader = DataLoader(samples, batch_size=1)
    modules = [NaNInPadding(0) for _ in range(2)]
    first, second = fit_on_ranks(modules, loader, uneven_inputs="join", on_nonfinite="raise")
    assert torch.equal(first, second)
    assert first.isfinite().all()


# ------------------------------------------------------------------------ gradients changed by hooks


class Clipped(Tokens):
    """Limits gradients by the norm of the parameters, without `torch.no_grad`, in a hook."""

    def __init__(self, hook: str) -> None:
        super().__init__(1)
        setattr(self, hook, self.limit)

    def limit(self, *arguments: Any) -> None:
        for parameter in self.parameters():
            gradient: Any = parameter.grad
            gradient.mul_((0.1 * parameter.norm() / gradient.norm()).clamp(max=1))


@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
@pytest.mark.parametrize("hook", ["configure_gradient_clipping", "on_before_optimizer_step"])
def test_hooks_that_change_gradients(hook: str, mode: str) -> None:
    """Gradients may be multiplied by a function of parameters: the weights are those of one process."""
    data = TensorDataset(batch(0, 0, 24), torch.ones(24, dtype=torch.float64))
    expected = fit_alone(Clipped(hook), DataLoader(data, batch_size=4), "logged", accumulate_grad_batches=3)
    options, modules = {"gradient_weighting": "logged", "sync_mode": mode}, [Clipped(hook) for _ in range(2)]
    found = fit_on_ranks(modules, DataLoader(data, batch_size=2), options, accumulate_grad_batches=3)
    assert_each(found, expected)

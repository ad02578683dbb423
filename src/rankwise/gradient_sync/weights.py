"""Run-time weights: what a rank notes of them, and the hook by which they travel with the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.errors import InvalidArgumentError, ProcessGroupError
from rankwise.gradient_sync.buckets import mean_over_ranks
from rankwise.gradient_sync.built_in_hooks import averaged

if TYPE_CHECKING:
    import torch.distributed as dist

    from rankwise.gradient_sync.comm_hooks import Hook

__all__ = ["EXACT", "WeightAccumulator", "WeightedReduction", "divide", "divide_tensors", "no_gradient_came"]

EXACT = (torch.float32, torch.float64)


@final
class WeightAccumulator:
    """This rank's weights of the window of microbatches that is being accumulated.

    Every loss is multiplied by its weight. What the ranks average is then a sum of weighted gradients, and is
    divided by the mean of their weights: the weighted average over all microbatches of all ranks.

    Args:
        is_bounded: whether gradients times weights are to stay about as large as gradients. Weights are then
            counted in units, the same on all ranks: about the mean of the last window, but a power of two,
            which changes no digit of what is multiplied.

    Attributes:
        unit: what weights are counted in; None before the first of bounded ones that is not 0.
        group: the ranks that agree on the first unit.
        is_weighted: whether a loss got a weight in this microbatch.
        is_used: whether one did in this window.
        averaged: the mean over the ranks of what a hook has sent in this window.
        num_reductions: how many buckets it has reduced in this window.
    """

    def __init__(self, is_bounded: bool = False) -> None:
        self.unit = None if is_bounded else 1.0
        self.group: dist.ProcessGroup | None = None
        self._is_bounded = is_bounded
        self._pending = 0.0
        self.averaged: float | Tensor = 0.0
        self._open()

    def bound(self) -> None:
        """Count in units from here on; before the first weight."""
        if not self._is_bounded:
            self._is_bounded, self.unit = True, None

    def add(self, weight: Any) -> float:
        """Note a microbatch's weight, and return it in units.

        Collective: every rank must call this for the first of bounded weights.

        Raises:
            InvalidArgumentError: for what is no finite number from 0 on.
        """
        number = float(weight)
        if not math.isfinite(number) or number < 0:
            raise InvalidArgumentError(argument="weight", value=number, expected="a finite number from 0 on")
        if self.unit is None:
            mean = mean_over_ranks(number, self.group)
            self.unit = _power_of_two(mean) if mean else None
        number /= self.unit or 1.0
        self._pending += number
        self.is_weighted = self.is_used = True
        return number

    def take(self) -> float:
        """Return what has not been averaged yet, which now is."""
        weight, self._pending = self._pending, 0.0
        return weight

    def close(self) -> None:
        """End the window, and begin the next."""
        if self._is_bounded and self.unit is not None and (mean := float(self.averaged)):
            self.unit *= _power_of_two(mean)
        self._open()

    def note(self, mean: float | Tensor) -> None:
        """Take over the mean of the window's weights from who has averaged them without a hook."""
        if self._is_bounded:
            self.averaged = mean.clone() if isinstance(mean, Tensor) else mean

    def _open(self) -> None:
        self._pending = 0.0
        self.averaged = 0.0
        self.is_weighted = self.is_used = False
        self.num_reductions = 0


def _power_of_two(number: float) -> float:
    return math.ldexp(1.0, math.frexp(number)[1])


@final
class WeightedReduction:
    """A communication hook that averages buckets, and the ranks' weights with them.

    For wrappers that a `WeightCarrier` cannot serve. The weight is one more element of the bucket that is
    reduced first, which travels in full; the others are averaged by another hook.

    Args:
        book: this rank's weights.
        group: the ranks to average over.
        others: the hook for the other buckets, with `group` as its state.
    """

    def __init__(self, book: WeightAccumulator, group: dist.ProcessGroup | None, others: Hook) -> None:
        self._book = book
        self._group = group
        self._others = others

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of gradients."""
        book = self._book
        buffer: Tensor = bucket.buffer()
        book.num_reductions += 1
        if bucket.index() > 0:
            others: torch.futures.Future[Tensor] = self._others(self._group, bucket)
            return others
        length = buffer.numel()
        sent = buffer.new_empty(length + 1, dtype=buffer.dtype if buffer.dtype in EXACT else torch.float32)
        sent[:length] = buffer
        sent[length] = book.take()

        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            book.averaged = book.averaged + sent[length]
            return buffer.copy_(sent[:length])

        return averaged(self._group, sent).then(finish)


def divide(parameters: Iterable[Tensor], mean: float | Tensor) -> None:
    """Divide the gradients of `parameters`, which are averaged, by the mean of the window's weights."""
    divide_tensors([parameter.grad for parameter in parameters if parameter.grad is not None], mean)


def divide_tensors(gradients: list[Tensor], mean: float | Tensor) -> None:
    """Divide gradients in place by the mean of the window's weights.

    Where that is 0 there is nothing but zeros to divide. A mean on another device than the CPU is not
    waited for, unless gradients lie on several devices.
    """
    is_there = isinstance(mean, Tensor) and all(gradient.device == mean.device for gradient in gradients)
    if isinstance(mean, Tensor) and is_there and not mean.is_cpu:
        torch._foreach_div_(gradients, mean.clamp_min(torch.finfo(mean.dtype).tiny))
    elif gradients and (number := float(mean)) != 0:
        torch._foreach_div_(gradients, number)


def no_gradient_came() -> ProcessGroupError:
    """Return the error for a window whose gradients, and the weights with them, were not averaged."""
    return ProcessGroupError(
        "A backward pass reached no parameter of the wrapped module, so this rank sent no weight; the "
        "others wait for it.",
        "compute the loss with what the wrapped module returns: loss = module(batch).",
    )

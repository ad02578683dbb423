"""Run-time weights: the average over the ranks is weighted by numbers that travel with the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import final

from rankwise.errors import InvalidArgumentError, ProcessGroupError

__all__ = ["WeightBook", "WeightedReduction"]

_EXACT = (torch.float32, torch.float64)


@final
class WeightBook:
    """This rank's weights of the window of microbatches that is being accumulated.

    Every loss is multiplied by its weight. What the ranks average is then a sum of weighted gradients, and is
    divided by the mean of their weights: the weighted average over all microbatches of all ranks.
    """

    def __init__(self) -> None:
        self.is_final = True
        self.divides_later = False  # DDP leaves a gradient as it is whose parameter no rank has used just now
        self._open()

    @property
    def divides_now(self) -> bool:
        """Whether the reduction that runs is to divide by the window's weights."""
        return self.is_final and not self.divides_later

    def _open(self) -> None:
        self.pending = 0.0  # not averaged yet
        self.averaged: float | Tensor = 0.0  # the mean over the ranks of what was, in this window
        self.is_used = False
        self.num_reductions = 0

    def add(self, weight: Any) -> float:
        """Note a microbatch's weight, and return it.

        Raises:
            InvalidArgumentError: for what is no finite number from 0 on.
        """
        number = float(weight)
        if not math.isfinite(number) or number < 0:
            raise InvalidArgumentError(argument="weight", value=number, expected="a finite number from 0 on")
        self.pending += number
        self.is_used = True
        return number

    def take(self) -> float:
        """Return what has not been averaged yet, which now is."""
        weight, self.pending = self.pending, 0.0
        return weight

    def close(self) -> None:
        """End the window."""
        self._open()

    def divide(self, parameters: Iterable[Tensor], mean: float | Tensor) -> None:
        """Divide the gradients of `parameters`, which are averaged, by the mean of the window's weights."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and float(mean) != 0:
            torch._foreach_div_(gradients, float(mean))


@final
class WeightedReduction:
    """A communication hook that averages buckets and divides them by the mean of the ranks' weights.

    The weight is one more element of the bucket that is reduced first; the others wait for it before they
    divide. With a `wire_dtype` all but that one travel compressed.

    Args:
        book: this rank's weights.
        group: the ranks to average over.
        wire_dtype: what gradients are sent as; None for what they are.
    """

    def __init__(
        self, book: WeightBook, group: dist.ProcessGroup | None, wire_dtype: torch.dtype | None = None
    ) -> None:
        self._book = book
        self._group: Any = dist.group.WORLD if group is None else group
        self._wire_dtype = wire_dtype
        self._factor: Any = 1.0
        self._first: Any = None

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of gradients."""
        self._book.num_reductions += 1
        buffer = bucket.buffer()
        return self._reduce_first(buffer) if bucket.index() == 0 else self._reduce(buffer)

    def _reduce_first(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        book, length = self._book, buffer.numel()
        sent = buffer.new_empty(length + 1, dtype=buffer.dtype if buffer.dtype in _EXACT else torch.float32)
        sent[:length] = buffer
        sent[length] = book.take()
        divides, before = book.divides_now, book.averaged
        share = 1 / dist.get_world_size(self._group)

        def finish(reduced: torch.futures.Future[Any]) -> Tensor:
            # On the CPU a plain number is quicker; elsewhere reading one would wait for the device.
            total: Any = sent[length].item() if sent.is_cpu else sent[length]
            mean = total * share + before
            if divides:
                self._factor = share / _not_zero(mean)
            else:
                self._factor, book.averaged = share, mean
            if sent.dtype is buffer.dtype:
                return torch.mul(sent[:length], self._factor, out=buffer)
            return buffer.copy_(sent[:length].mul_(self._factor))

        self._first = first = self._sum(sent, finish)
        return first

    def _reduce(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        first, dtype = self._first, self._wire_dtype
        is_sent_as_it_is = dtype is None or dtype is buffer.dtype
        sent = buffer if is_sent_as_it_is else buffer.to(dtype)

        def finish(reduced: torch.futures.Future[Any]) -> Tensor:
            first.wait()  # reduced first, so it is on its way; on CUDA this orders the streams
            return (buffer if is_sent_as_it_is else buffer.copy_(sent)).mul_(self._factor)

        return self._sum(sent, finish)

    def _sum(self, sent: Tensor, finish: Any) -> torch.futures.Future[Tensor]:
        work: Any = self._group.allreduce([sent])  # what dist.all_reduce does, less its checks in each step
        future: torch.futures.Future[Tensor] = work.get_future().then(finish)
        return future


def _not_zero(mean: Any) -> Any:
    """Return what to divide by: a window without any weight has nothing but zeros to divide."""
    return torch.where(mean == 0, 1, mean) if isinstance(mean, Tensor) else mean or 1.0


def check_reduced(book: WeightBook) -> None:
    """Make sure that a window's gradients, and the weights with them, were averaged.

    Raises:
        ProcessGroupError: when no gradient was.
    """
    if book.is_used and book.num_reductions == 0:
        raise ProcessGroupError(
            "A backward pass reached no parameter of the wrapped module, so this rank sent no weight; the "
            "others wait for it.",
            "compute the loss with what the wrapped module returns: loss = module(batch).",
        )

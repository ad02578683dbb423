"""`WeightCarrier`: run-time weights travel in DDP's own buckets, as the gradient of one more parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.buckets import FlatGradients
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.gradient_sync.weights import EXACT, WeightAccumulator, divide_tensors, no_gradient_came

__all__ = ["WeightCarrier"]

_NAME = "_rankwise_weight"


@final
class WeightCarrier:
    """One parameter more, for DDP: it has no part in the loss, and its gradient is the sum of the weights.

    That is written before the backward pass, which adds nothing to it, however the loss is scaled. DDP
    averages it along with all other gradients, in the first bucket, without a hook. What it holds once a
    window is averaged is what to divide the others by. It is part of the user's module while DDP looks for
    parameters, and at no other time.

    Args:
        book: this rank's weights.
        averaged: the parameters whose gradients are averaged.
        like: one of them, whose dtype can count weights.
    """

    def __init__(self, book: WeightAccumulator, averaged: list[Tensor], like: Tensor) -> None:
        self._book = book
        self._averaged = averaged
        self._watched = averaged[-1]  # its gradient tells whether any came
        self.total = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))
        self.total.grad = torch.zeros_like(self.total)
        self._gradients = FlatGradients([*averaged, self.total])
        self._zero = torch.zeros_like(self.total)

    @classmethod
    def of(cls, module: nn.Module, book: WeightAccumulator | None) -> WeightCarrier | None:
        """Return one for a module; None where there are no weights, or it has 16-bit parameters only."""
        averaged = trained_parameters(module)
        like = next((parameter for parameter in averaged if parameter.dtype in EXACT), None)
        return None if book is None or like is None else cls(book, averaged, like)

    @contextmanager
    def attached_to(self, module: nn.Module) -> Iterator[None]:
        """Have the parameter in a child of the module; the last one, so that DDP's numbers of others stay."""
        lent = nn.Module()
        lent.total = self.total
        module.add_module(_NAME, lent)
        try:
            yield
        finally:
            del module._modules[_NAME]

    def is_in(self, wrapped: DistributedDataParallel) -> bool:
        """Return whether a wrapper, made while this was lent, averages this parameter."""
        is_there = any(parameter is self.total for parameter in wrapped.module.parameters())
        return is_there and not wrapped.find_unused_parameters

    def weighted(self, loss: Tensor, weight: float, *, is_first: bool) -> Tensor:
        """Return the loss times its weight, which is sent when gradients of that are computed.

        `is_first`: no other loss of the window had a weight before.
        """
        weights: Any = self.total.grad
        if is_first:
            weights.fill_(weight)
        else:
            weights.add_(weight)
        # Made anew and last, so that the backward pass comes to it first: its place is in the first bucket.
        nothing = torch.add(self._zero, self.total, alpha=0)
        return torch.add(
            nothing if nothing.device == loss.device else nothing.to(loss.device), loss, alpha=weight
        )

    # ------------------------------------------------------------------ a reduction

    def before(self) -> Any:
        """Return what `check_after` compares with."""
        gradient = self._watched.grad
        return gradient, None if gradient is None else gradient._version

    def check_weighted(self) -> None:
        """Make sure that a loss had a weight in this microbatch.

        Raises:
            ConfigurationError: when none had.
        """
        if not self._book.is_weighted:
            raise ConfigurationError(
                message='gradient_weighting="logged", but the loss that was reduced has no weight.',
                facts="the other ranks wait for it.",
                remedy="strategy.weighted_loss(loss, weight).backward()",
            )

    def check_after(self, before: Any) -> None:
        """Make sure that DDP has averaged gradients, and the weight with them, since `before()`.

        Raises:
            ProcessGroupError: when it has not.
        """
        gradient, version = before
        now = self._watched.grad
        if now is not gradient or (now is not None and now._version != version):
            return
        used = [parameter for parameter in self._averaged if parameter.grad is not None]
        if now is not None or not used:
            raise no_gradient_came()
        self._watched = used[-1]  # the loss does not use the one before, as it may with static_graph=True

    def divide(self) -> None:
        """End a window: divide its gradients by the mean of its weights."""
        total: Any = self.total.grad
        mean = total.item() if total.is_cpu else total.clone()
        self._book.note(mean)
        divide_tensors(self._gradients.pieces(), mean)

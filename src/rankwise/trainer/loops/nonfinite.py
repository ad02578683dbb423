"""Infinite and NaN losses: every rank raises, or skips the step, when one rank has such a loss."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from rankwise.errors import ConfigurationError, NonFiniteLossError
from rankwise.precision import MasterWeightsPrecision, are_finite, gradient_values

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.state import LoopContext

_log = logging.getLogger(__name__)


def check_hook(strategy: Strategy, on_nonfinite: str | None) -> None:
    """Check that a communication hook works with the precision, and with skipped steps."""
    hook, precision = strategy.gradients.hook, strategy.precision
    if hook is None:
        return
    if hook.is_local_sgd and isinstance(precision, MasterWeightsPrecision):
        raise ConfigurationError(
            message="Post-local SGD cannot be used with master weights: it averages them after the rounding.",
            facts=f"precision={precision.name!r}, comm_hook={hook.name!r}.",
            remedy='use precision="bf16-mixed", or comm_hook="bf16_compress".',
        )
    if "powersgd" in hook.name.lower() and (precision.scales_loss or on_nonfinite == "skip"):
        raise ConfigurationError(
            message="PowerSGD cannot be used where steps are skipped: it keeps their infinite gradients.",
            facts=f"precision={precision.name!r}, on_nonfinite={on_nonfinite!r}, comm_hook={hook.name!r}.",
            remedy='use precision="bf16-mixed", which skips nothing, or comm_hook="bf16_compress".',
        )


@final
class NonFiniteGuard:
    """Decide from the averaged gradients whether to step, so that every rank decides the same.

    A loss that is not finite makes its rank's gradients NaN, and averaging makes them NaN on every rank. Only
    then do the ranks exchange whose loss it was.
    """

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._progress = context.state.progress
        self._policy = context.options.on_nonfinite
        self._may_differ = context.strategy.gradients_may_differ(context.wrapped)  # with hooks of the user's
        self._is_bad: Tensor | None = None

    def mark(self, loss: Tensor) -> Tensor:
        """Return the loss, with gradients of NaN if it is not finite. Does not wait for the device."""
        is_bad = ~torch.isfinite(loss.detach()).all()
        self._is_bad = is_bad if self._is_bad is None else self._is_bad | is_bad
        return loss * torch.where(is_bad, torch.nan, 1.0).to(loss.dtype)

    def clear(self) -> None:
        """Clear the record of losses that are not finite, together with the gradients."""
        self._is_bad = None

    def allows_step(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer may step; with `on_nonfinite="raise"`, raise on every rank otherwise.

        Collective: every rank must call this, after gradients are averaged.
        """
        if self._are_finite(optimizer):
            return True
        is_bad = self._is_bad is not None and bool(self._is_bad)
        bad_by_rank = self._strategy.all_gather_object(is_bad, self._strategy.job_group)
        ranks = tuple(rank for rank, is_bad in enumerate(bad_by_rank) if is_bad)
        scales_loss = self._strategy.precision.scales_loss
        if scales_loss and not ranks:
            return True  # a scaled gradient may overflow although every loss is finite; the scaler handles it
        error = NonFiniteLossError(
            global_step=self._progress.global_step,
            epoch=self._progress.current_epoch,
            batch_idx=self._progress.batches_done,
            global_ranks=ranks,
            world_size=self._strategy.world_size,
        )
        if self._policy == "raise":
            raise error
        if self._strategy.is_global_zero:
            _log.warning("%s This step is skipped, on every rank.", error.summary())
        return scales_loss  # the scaler itself skips the step, and lowers its scale

    def _are_finite(self, optimizer: Optimizer) -> bool:
        precision = self._strategy.precision
        precision.unscale_gradients(optimizer)
        is_finite = are_finite(gradient_values(precision.main_parameters(optimizer)))
        must_agree = self._may_differ or precision.agree is not None
        return self._strategy.reduce_boolean_decision(is_finite) if must_agree else is_finite

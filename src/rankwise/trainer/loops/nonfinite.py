"""`NonFiniteGuard`: what happens when a loss is infinite or NaN on any rank: the same, on all of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.errors import ConfigurationError, NonFiniteLossError
from rankwise.precision import MasterWeightsPrecision, are_finite
from rankwise.ranks import rank_zero_only

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.loops.context import LoopContext

__all__ = ["NonFiniteGuard", "check_hook"]

_log = logging.getLogger(__name__)


def check_hook(strategy: Strategy, on_nonfinite: str | None) -> None:
    """Make sure that a communication hook can do with the precision, and with steps that are skipped.

    PowerSGD adds what it could not send to the next step's gradients: a NaN would stay in them for ever.
    Post-local SGD averages what optimizers update, when weights are rounded from that already.

    Raises:
        ConfigurationError: when it cannot.
    """
    hook = strategy.gradients.hook
    precision = strategy.precision
    if hook is not None and hook.is_local_sgd and isinstance(precision, MasterWeightsPrecision):
        raise ConfigurationError(
            message="Post-local SGD cannot be used with master weights: it would average them unseen.",
            facts=f"precision={precision.name!r}, comm_hook={hook.name!r}.",
            remedy='use precision="bf16-mixed", or comm_hook="bf16_compress".',
        )
    is_skipping = precision.scales_loss or on_nonfinite == "skip"
    if hook is None or "powersgd" not in hook.name.lower() or not is_skipping:
        return
    raise ConfigurationError(
        message="PowerSGD cannot be used where steps are skipped: it remembers their infinite gradients.",
        facts=f"precision={precision.name!r}, on_nonfinite={on_nonfinite!r}, comm_hook={hook.name!r}.",
        remedy='use precision="bf16-mixed", which skips nothing, or comm_hook="bf16_compress".',
    )


@final
class NonFiniteGuard:
    """Judge steps by the gradients that all ranks have in common, so that all ranks judge alike.

    A loss that is not finite makes its rank's gradients NaN, and the averaging of gradients carries that
    to every rank. Only where a step is bad do the ranks ask each other whose loss it was.

    Args:
        context: of this rank.

    Attributes:
        may_differ: whether gradients may be each rank's own, so that the ranks must ask each other.
    """

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._progress = context.progress
        self._policy = context.settings.on_nonfinite
        self.may_differ = context.strategy.gradients_may_differ(context.wrapped)
        self._is_bad: Tensor | None = None

    def mark(self, loss: Tensor) -> Tensor:
        """Return the loss, so that its gradients are NaN if it is not finite; waits for no device."""
        if self._policy is None:
            return loss
        is_bad = ~torch.isfinite(loss.detach()).all()
        self._is_bad = is_bad if self._is_bad is None else self._is_bad | is_bad
        return loss * torch.where(is_bad, torch.nan, 1.0).to(loss.dtype)

    def forget(self) -> None:
        """Forget the losses so far: their gradients are cleared."""
        self._is_bad = None

    def allows_step(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is to step; the gradients must be averaged.

        Collective: every rank must call this.

        Raises:
            NonFiniteLossError: on every rank, with `on_nonfinite="raise"`.
        """
        if self._policy is None or self._are_finite(optimizer):
            return True
        is_bad = self._is_bad is not None and bool(self._is_bad)
        counter = self._strategy.all_gather_object(is_bad, dist.group.WORLD)
        ranks = tuple(rank for rank, is_bad in enumerate(counter) if is_bad)
        # Where losses are scaled, a gradient may overflow with every loss in order: the scaler sees to that.
        scales_loss = self._strategy.precision.scales_loss
        if scales_loss and not ranks:
            return True
        error = NonFiniteLossError(
            global_step=self._progress.global_step,
            epoch=self._progress.current_epoch,
            batch_idx=self._progress.batches_done,
            global_ranks=ranks,
            world_size=self._strategy.world_size,
        )
        if self._policy == "raise":
            raise error
        _announce(error.summary())
        return scales_loss  # the scaler skips the step, and must see it

    def _are_finite(self, optimizer: Optimizer) -> bool:
        precision = self._strategy.precision
        precision.unscale_gradients(optimizer)
        parameters = precision.main_parameters(optimizer)
        is_finite = are_finite([parameter.grad for parameter in parameters if parameter.grad is not None])
        return is_finite if not self.may_differ else self._strategy.reduce_boolean_decision(is_finite)


@rank_zero_only
def _announce(text: str) -> None:
    _log.warning("%s This step is skipped, on every rank.", text)

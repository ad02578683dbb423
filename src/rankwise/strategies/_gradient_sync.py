"""`Gradients`: how a strategy's gradients are averaged, weighted and accumulated."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rankwise.gradient_sync import GradientSync
from rankwise.gradient_sync.parameters import share_buffers
from rankwise.gradient_sync.unused import explain_unused
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.precision import Precision

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Gradients:
    """The gradients of a strategy.

    Attributes:
        gradients: when they are averaged, through which hook, with which weights.
        precision: knows which parameters optimizers update, be it through copies of them.
    """

    gradients: GradientSync
    precision: Precision

    @property
    def gradient_weighting(self) -> str | None:
        """`"samples"`, `"logged"`, or None where each rank and microbatch counts alike."""
        return self.gradients.weighting

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes leave gradients as they are, on this rank."""
        return nullcontext()

    def gradient_sync_context(
        self, module: nn.Module, optimizers: Iterable[Optimizer] = (), is_final_microbatch: bool = True
    ) -> AbstractContextManager[None]:
        """Return the block for a microbatch's forward and backward pass, in the strategy's `sync_mode`.

        Collective: every rank must enter it; see `rankwise.gradient_sync.gradient_sync_context`.

        Args:
            module: what `setup_module` returned.
            optimizers: those that step after the window.
            is_final_microbatch: whether they step next.

        Raises:
            UnusedParametersError: when parameters had no part in the loss, though DDP counts on all.
        """
        return self.gradients.context(
            module, optimizers, is_final_microbatch, self.no_backward_sync, self.precision.model_parameters
        )

    def share_buffers(self, module: nn.Module) -> None:
        """Give all ranks rank 0's buffers, as DDP does before it trains; nothing where it leaves them alone.

        Collective: every rank must call this.

        Args:
            module: what `setup_module` returned.
        """
        with blocked_in("share_buffers"):
            share_buffers(module)

    def weighted_loss(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return what to compute gradients of, for a loss that counts `weight` times.

        With `gradient_weighting="logged"` the gradients are then the weighted average over all microbatches
        of all ranks, once a `gradient_sync_context` has ended their window.

        Args:
            loss: a mean, over tokens for example.
            weight: over how many it is the mean; it may be 0.

        Raises:
            ConfigurationError: with another `gradient_weighting`.
            InvalidArgumentError: for a weight that is negative or not finite.
        """
        return self.gradients.weighted(loss, weight)

    def end_training(self) -> None:
        """Have one model on all ranks, where a communication hook let them drift apart.

        Collective: every rank must call this.
        """
        self.gradients.finish()

    def is_sharded(self, optimizer: Optimizer) -> bool:
        """Return whether each rank has a part of the optimizer's state only."""
        sharded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        return sharded is not None and isinstance(optimizer, sharded.ZeroRedundancyOptimizer)

    def translate_error(self, error: BaseException) -> BaseException:
        """Return DDP's error about unused parameters with their names in it, and any other as it is."""
        translate_error = explain_unused(error)
        return error if translate_error is None else translate_error.with_traceback(error.__traceback__)

    def comm_hook_states(self) -> list[list[dict[str, Any]]]:
        """Return what communication hooks remember, by rank and wrapped module; on rank 0, elsewhere [].

        Collective: every rank must call this.
        """
        return self.gradients.gathered_states()

    def load_comm_hook_states(self, states: list[list[dict[str, Any]]]) -> None:
        """Take back what `comm_hook_states` returned on rank 0; [] forgets it."""
        self.gradients.load_states(states)

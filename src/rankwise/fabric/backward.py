"""`BackwardChecks`: refuse backward passes that would compute other gradients than were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync import GradientSyncMode
from rankwise.precision import Precision

if TYPE_CHECKING:
    from torch import Tensor

    from rankwise.strategies import Strategy


@final
class BackwardChecks:
    """Whether a backward pass runs through `Fabric.backward`, and in the block that its gradients need."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._num_contexts = 0  # blocks of `gradient_sync_context` that are open
        self._is_running = False

    @property
    def _needs_context(self) -> bool:
        gradients = self._strategy.gradients
        return gradients.weighting is not None or gradients.mode is GradientSyncMode.FORCED_SYNC

    @contextmanager
    def in_sync_context(self) -> Iterator[None]:
        """Return the block of a `gradient_sync_context`."""
        self._num_contexts += 1
        try:
            yield
        finally:
            self._num_contexts -= 1

    @contextmanager
    def running(self, weight: Any) -> Iterator[None]:
        """Return the block of `Fabric.backward`, of a loss with that weight, or None.

        Raises:
            ConfigurationError: without a weight that is asked for, and outside of a context that is needed.
        """
        strategy = self._strategy
        if strategy.gradient_weighting == "logged" and weight is None:
            raise ConfigurationError(
                message="A loss has no weight.",
                facts='the strategy has gradient_weighting="logged".',
                remedy="fabric.backward(loss, weight=n), where the loss is the mean of n items.",
            )
        if self._needs_context and not self._num_contexts:
            raise ConfigurationError(
                message="backward() was called outside of the block that averages gradients.",
                facts=f"the strategy has sync_mode={strategy.gradients.mode.value!r}, "
                f"gradient_weighting={strategy.gradient_weighting!r}.",
                remedy="with fabric.gradient_sync_context(module, optimizer): for forward and backward pass.",
            )
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def guarded(self, output: Tensor) -> Tensor:
        """Make `output.backward()` an error where only `Fabric.backward` computes the right gradients."""
        precision = self._strategy.precision
        is_own = type(precision).backward is not Precision.backward and precision.scales_loss
        if output.requires_grad and (is_own or self._needs_context):
            output.register_hook(self._check_running)
        return output

    def _check_running(self, gradient: Tensor) -> None:
        if not self._is_running:
            raise ConfigurationError(
                message="loss.backward() was called instead of fabric.backward(loss).",
                facts=f"{self._strategy.precision!r}, "
                f"gradient_weighting={self._strategy.gradient_weighting!r}: the loss must be scaled.",
                remedy="fabric.backward(loss).",
            )

"""`BackwardChecks`: refuse backward passes that would compute other gradients than were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync import GradientSyncMode
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.precision import Precision
from rankwise.strategies import Strategy


@final
class BackwardChecks:
    """Whether a backward pass runs through `Fabric.backward`, and in the block that its gradients need."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._has_late_average = False  # the end of a block averages gradients, no backward pass does
        self._num_contexts = 0  # blocks of `gradient_sync_context` that are open
        self._is_running = False

    def add_module(self, wrapped: nn.Module) -> None:
        """Note a module that was set up: without DDP, backward passes do not average its gradients."""
        if self._strategy.world_size > 1 and not isinstance(wrapped, DistributedDataParallel):
            self._has_late_average |= bool(trained_parameters(wrapped))

    @property
    def _needs_context(self) -> bool:
        gradients = self._strategy.gradients
        is_asked_for = gradients.weighting is not None or gradients.mode is GradientSyncMode.FORCED_SYNC
        return is_asked_for or self._has_late_average

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
        """Return the block of `Fabric.backward`; refuse a loss that lacks a weight or context it needs."""
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
                facts="the strategy averages gradients at the end of the block."
                if self._has_late_average
                else f"the strategy has sync_mode={strategy.gradients.mode.value!r}, "
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

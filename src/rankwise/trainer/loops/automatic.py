"""Automatic optimisation of a training batch: forward, backward, accumulation, clipping, optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.monitoring.heartbeat import report_phase
from rankwise.trainer.loops.closures import check_closures, mean_loss
from rankwise.trainer.loops.nonfinite import NonFiniteGuard
from rankwise.trainer.loops.uneven_inputs import PaddingGradients
from rankwise.trainer.loops.weighting import BatchWeighting, zero_gradients

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer.loops.uneven_inputs import BatchSchedule
    from rankwise.trainer.state import LoopContext


@final
class AutomaticOptimization:
    """Accumulate gradients over a window of batches, then step the optimizer once.

    Attributes:
        has_stepped: whether the last window changed the weights; a step may have been skipped.
    """

    def __init__(self, context: LoopContext, schedule: BatchSchedule) -> None:
        self._context = context
        self._strategy = context.strategy
        self._module = context.module
        self._schedule = schedule
        self._padding = PaddingGradients(context)
        self._guard = NonFiniteGuard(context)
        self._is_window_start = True
        self._has_gradients = False
        self._needs_closure = check_closures(context)
        self._weight: float | Tensor = 1.0  # of the last batch
        self.weighting = BatchWeighting(context, schedule)
        self.has_stepped = False

    def run_batch(self, batch: Any, batch_idx: int, is_window_end: bool) -> Any:
        """Compute gradients; step at the end of a window. Collective: every rank must call this."""
        if self._is_window_start:
            self._clear_gradients()
        self._is_window_start = is_window_end
        if (factor := self.weighting.begin_batch(batch_idx, is_window_end)) != 1:
            self._scale_gradients(factor)
        if self._needs_closure:
            return self._step_with_closure(batch, batch_idx)
        outputs = self._forward_backward(batch, batch_idx, is_window_end)
        if is_window_end:
            self._padding.end_window()
            self._step()
        return outputs

    def _forward_backward(self, batch: Any, batch_idx: int, is_window_end: bool) -> Any:
        """Compute gradients; only the last batch of a window averages them over the ranks."""
        context, strategy, schedule = self._context, self._strategy, self._schedule
        has_backward = False
        synced = strategy.gradient_sync_context(context.wrapped, context.optimizers, is_window_end)
        separated = self._padding.separate(is_padding=schedule.is_padding, has_padding=schedule.has_padding)
        with schedule.preserve_state(), synced, separated:
            report_phase("forward", step=context.state.progress.global_step)
            with strategy.precision.forward_context():
                outputs = strategy.call_method(context.wrapped, "training_step", batch, batch_idx)
            loss = self._loss_of(outputs, batch_idx)
            if loss is not None and context.optimizers:
                self._backward(loss, self.weighting.weight(outputs, batch_idx))
                has_backward = True
        if has_backward:
            self._has_gradients = True
            self._module.on_after_backward()
        return outputs

    def _step_with_closure(self, batch: Any, batch_idx: int) -> Any:
        """Step an optimizer that computes the gradients itself; return the outputs of the first time."""
        context, strategy = self._context, self._strategy
        [optimizer] = context.optimizers
        seen: list[Any] = []

        def closure() -> Tensor:
            self._clear_gradients()
            with context.stage.results.muted() if seen and context.stage.results else nullcontext():
                outputs = self._forward_backward(batch, batch_idx, is_window_end=True)
            self._padding.end_window()
            self._module.on_before_optimizer_step(optimizer)
            self._clip_gradients(optimizer)
            seen.append(outputs)
            loss = self._loss_of(outputs, batch_idx)
            return mean_loss(strategy, 0.0 if loss is None else loss, self._weight)

        strategy.optimizer_step(optimizer, closure)
        self.has_stepped = True
        context.state.progress.global_step += 1
        return seen[0]

    def _backward(self, loss: Tensor, weight: float | Tensor) -> None:
        self._weight = weight
        is_left_out = float(weight) == 0
        loss = self.weighting.scaled(loss if is_left_out else self._guard.mark(loss), weight)
        self._module.on_before_backward(loss)
        if not is_left_out:
            self._strategy.backward(loss)
            return
        with zero_gradients(trained_parameters(self._context.wrapped, self._context.optimizers)):
            self._strategy.backward(loss)

    def _loss_of(self, outputs: Any, batch_idx: int) -> Tensor | None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) or (loss is None and self._strategy.world_size == 1):
            return loss
        raise ConfigurationError(
            message=f"training_step returned {loss!r} instead of a loss tensor.",
            facts=f"global_rank={self._strategy.global_rank}, batch {batch_idx}; the others wait.",
            remedy="return the loss, or a dictionary with 'loss'; to skip a batch, return the loss times 0.",
        )

    def _clear_gradients(self) -> None:
        self._has_gradients = False
        self._guard.clear()
        for optimizer in self._context.optimizers:
            self._module.on_before_zero_grad(optimizer)
            self._strategy.precision.zero_grad(optimizer)

    def _scale_gradients(self, factor: float) -> None:
        parameters_of = self._strategy.precision.model_parameters
        for parameter in trained_parameters(self._context.wrapped, self._context.optimizers, parameters_of):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _step(self) -> None:
        strategy = self._strategy
        self.has_stepped = False
        for optimizer in self._context.optimizers if self._has_gradients else ():
            if self._guard.allows_step(optimizer):
                strategy.precision.unscale_gradients(optimizer)
                self._module.on_before_optimizer_step(optimizer)
                self._clip_gradients(optimizer)
                strategy.optimizer_step(optimizer)
                self.has_stepped = not strategy.precision.has_skipped_step
            else:
                strategy.gradients.after_step(optimizer)  # its gradients were averaged, which is counted
        self._context.state.progress.global_step += 1

    def _clip_gradients(self, optimizer: Optimizer) -> None:
        settings, precision = self._context.options, self._strategy.precision
        if limit := settings.gradient_clip_val:
            is_norm = settings.gradient_clip_algorithm == "norm"
            clip = precision.clip_gradients_norm if is_norm else precision.clip_gradients_value
            clip(optimizer, limit)

"""Automatic optimisation of a training batch: forward, backward, accumulation, clipping, optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.options import GradientSyncMode
from rankwise.gradient_sync.parameters import all_parameters, trained_parameters
from rankwise.monitoring.heartbeat import report_phase
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import mean_loss
from rankwise.trainer.data.data_module import is_own
from rankwise.trainer.hooks import num_step_arguments
from rankwise.trainer.loops.closures import takes_closures
from rankwise.trainer.loops.nonfinite import NonFiniteGuard
from rankwise.trainer.loops.optimizers import needs_closure, optimizer_step_of
from rankwise.trainer.loops.uneven_inputs import PaddingGradients
from rankwise.trainer.loops.weighting import BatchWeighting, gradients_kept, zero_gradients
from rankwise.trainer.module import TrainerOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer.loops.uneven_inputs import BatchSchedule
    from rankwise.trainer.state import LoopContext

_NOTHING = nullcontext()


@final
class AutomaticOptimization:
    """Accumulate gradients over a window of batches, then step the optimizer once."""

    def __init__(self, context: LoopContext, schedule: BatchSchedule) -> None:
        self._context = context
        self._strategy = context.strategy
        self._module = context.module
        self._schedule = schedule
        # Whether `gradient_sync_context` does anything in this stage; a strategy's own one may.
        self._must_sync = is_own(context.strategy, Strategy, "gradient_sync_context") or (
            context.strategy.gradients.acts_on(context.wrapped, context.strategy.data_parallel_group)
        )
        self._padding = PaddingGradients(context)
        self._guard = None if context.options.on_nonfinite is None else NonFiniteGuard(context)
        self._is_window_start = True
        self._has_gradients = False
        self._random = context.stage.random
        context.strategy.gradients.in_hooks = partial(context.stage.random.shared, "tensor hooks")
        self._optimizer_step = optimizer_step_of(context.strategy, context.stage.random)
        hooks = self._hooks = context.hooks
        own_step = hooks.own("optimizer_step")
        may_take_closures = own_step is not None or any(map(needs_closure, context.optimizers))
        self._takes_closures = may_take_closures and takes_closures(context)
        self._step_hook = own_step or context.module.optimizer_step
        self._steps_with_closure = self._takes_closures or own_step is not None
        self._zero_grad = hooks.own("optimizer_zero_grad")
        self._clip = hooks.own("configure_gradient_clipping")
        own_backward = hooks.own("backward")
        self._backward_options = {} if own_backward is None else {"run": own_backward}
        # As in Lightning, the old gradients are cleared after the forward pass if a hook can tell the
        # difference. Otherwise they are cleared before it, which takes less memory.
        seeing = ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")
        self._clears_late = any(map(hooks.is_defined, seeing))
        self._may_change_gradients = self._strategy.world_size > 1 and hooks.is_defined("on_after_backward")
        self._step_arguments = num_step_arguments(context.module, "training_step")
        self._weight: float | Tensor = 1.0  # of the last batch
        self.weighting = BatchWeighting(context, schedule)
        self.has_stepped = False  # whether the last window changed the weights; a step may have been skipped

    def begin_epoch(self) -> None:
        """Start the first window of an epoch; a window that was not finished is forgotten."""
        if not self._is_window_start:
            self._strategy.gradients.abandon_window(self._context.wrapped)
        self._is_window_start = True
        self.weighting.begin_epoch()

    def run_batch(self, batch: Any, batch_idx: int, is_window_end: bool) -> Any:
        """Compute gradients; step at the end of a window. Collective: every rank must call this."""
        is_start, self._is_window_start = self._is_window_start, is_window_end
        factor = self.weighting.begin_batch(batch_idx, is_window_end)
        if factor != 1 and not is_start:
            for parameter in self._all_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        compute = partial(self._forward_backward, batch, batch_idx, is_start, is_window_end)
        if is_window_end and self._steps_with_closure and self._context.optimizers:
            return self._step_with_closure(compute, batch_idx)
        outputs = compute()
        if is_window_end:
            self._padding.end_window()
            self.has_stepped = False
            for optimizer in self._context.optimizers if self._has_gradients else ():
                self._step_optimizer(optimizer)
            self._context.state.progress.global_step += 1
        return outputs

    def _forward_backward(self, batch: Any, batch_idx: int, is_start: bool, is_window_end: bool) -> Any:
        """Compute gradients; only the last batch of a window averages them over the ranks."""
        context, strategy, schedule = self._context, self._strategy, self._schedule
        arguments = (batch, batch_idx)[: self._step_arguments]
        has_backward = False
        if is_start and not self._clears_late:
            self._clear_gradients(batch_idx)
        synced: AbstractContextManager[None] = _NOTHING
        if self._must_sync:
            synced = strategy.gradient_sync_context(context.wrapped, context.optimizers, is_window_end)
        with schedule.preserve_state(), synced:
            report_phase("forward", step=context.state.progress.global_step)
            with strategy.precision.forward_context():
                call = schedule.call_method if schedule.has_padding else strategy.call_method
                outputs = call(context.wrapped, "training_step", *arguments)
            loss = self._loss_of(outputs, batch_idx)
            if is_start and self._clears_late:
                self._clear_gradients(batch_idx)
            if loss is not None and context.optimizers:
                weight = self.weighting.weight(outputs, batch_idx)
                with self._padding.separate(schedule.is_padding) if schedule.has_padding else _NOTHING:
                    self._backward(loss, weight)
                has_backward = True
        if has_backward:
            self._has_gradients = True
            are_kept = self._may_change_gradients and not is_window_end
            with self._gradients_kept() if are_kept else _NOTHING:
                self._hooks.call("on_after_backward")
        return outputs

    def _gradients_kept(self) -> AbstractContextManager[None]:
        """Return the block in which no hook may change the gradients that are averaged later."""
        context, gradients = self._context, self._strategy.gradients
        if gradients.mode is GradientSyncMode.MULTI_AUTO_SYNC:
            parameters = gradients.averaged_later(context.wrapped)
        else:
            parameters = self._all_parameters()
        return gradients_kept(parameters, 'DDPStrategy(sync_mode="multi_auto_sync")')

    def _step_with_closure(self, compute: Callable[[], Any], batch_idx: int) -> Any:
        """Step in `optimizer_step` of the module; return the outputs of the first call of the closure."""
        context, results = self._context, self._context.stage.results
        [optimizer] = context.optimizers
        seen: list[Any] = []

        @torch.enable_grad()
        def closure() -> Tensor | None:
            with results.muted() if seen and results else nullcontext(), self._random.own():
                seen.append(compute())
            self._padding.end_window()
            loss = self._loss_of(seen[-1], batch_idx)
            return None if loss is None else loss.detach()

        self.has_stepped = True
        epoch = context.state.progress.current_epoch
        self._step_hook(epoch, batch_idx, TrainerOptimizer(self, optimizer), closure)
        if not seen:
            name = f"{type(self._module).__name__}.optimizer_step"
            raise ConfigurationError(
                message=f"{name}() has not called its closure, so nothing was computed.",
                facts=f"batch {batch_idx}, global_rank={self._strategy.global_rank}.",
                remedy="optimizer.step(closure=optimizer_closure); without a step, optimizer_closure().",
            )
        context.state.progress.global_step += 1
        return seen[0]

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer once, in `optimizer_step` of the module; return the closure's loss."""
        if closure is not None and self._takes_closures:
            agreed = partial(self._agreed_loss, optimizer, closure)
            return self._optimizer_step(optimizer, agreed, **options)
        loss = None if closure is None else closure()
        if self._has_gradients:
            self._step_optimizer(optimizer, **options)
        else:
            self.has_stepped = False
        return loss

    def _agreed_loss(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call a closure, and prepare the gradients for a step; return the mean of the ranks' losses."""
        loss = closure()
        self._hooks.call("on_before_optimizer_step", optimizer)
        self._clip_gradients(optimizer)
        return mean_loss(self._strategy, 0.0 if loss is None else loss, self._weight)

    def zero_grad(self, optimizer: Optimizer, **options: Any) -> None:
        """Clear the gradients of an optimizer's parameters, in `optimizer_step` of the module."""
        self._strategy.precision.zero_grad(optimizer, **options)

    def _backward(self, loss: Tensor, weight: float | Tensor) -> None:
        self._weight = weight
        is_left_out = float(weight) == 0
        if self._guard is not None and not is_left_out:
            loss = self._guard.mark(loss)
        loss = self.weighting.scaled(loss, weight)
        self._hooks.call("on_before_backward", loss)
        if not is_left_out:
            self._strategy.backward(loss, **self._backward_options)
            return
        with zero_gradients(trained_parameters(self._context.wrapped, self._context.optimizers)):
            self._strategy.backward(loss, **self._backward_options)

    def _loss_of(self, outputs: Any, batch_idx: int) -> Tensor | None:
        if isinstance(outputs, Tensor):
            return outputs
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) or (loss is None and self._strategy.world_size == 1):
            return loss
        raise ConfigurationError(
            message=f"training_step returned {loss!r} instead of a loss tensor.",
            facts=f"global_rank={self._strategy.global_rank}, batch {batch_idx}; the others wait.",
            remedy="return the loss, or a dictionary with 'loss'; to skip a batch, return the loss times 0.",
        )

    def _clear_gradients(self, batch_idx: int) -> None:
        self._has_gradients = False
        if self._guard is not None:
            self._guard.clear()
        for optimizer in self._context.optimizers:
            self._hooks.call("on_before_zero_grad", optimizer)
            if self._zero_grad is None:
                self._strategy.precision.zero_grad(optimizer)
            else:
                self._zero_grad(self._context.state.progress.current_epoch, batch_idx, optimizer)

    def _all_parameters(self) -> list[Tensor]:
        """Return what may have gradients of this window, also what was frozen within it."""
        parameters_of = self._strategy.precision.model_parameters
        return all_parameters(self._context.wrapped, self._context.optimizers, parameters_of)

    def _step_optimizer(self, optimizer: Optimizer, **options: Any) -> None:
        """Step an optimizer after its gradients were computed, unless they are not finite."""
        strategy = self._strategy
        if self._guard is not None and not self._guard.allows_step(optimizer):
            strategy.gradients.after_step(optimizer)  # its gradients were averaged, which is counted
            self.has_stepped = False
            return
        strategy.precision.unscale_gradients(optimizer)
        self._hooks.call("on_before_optimizer_step", optimizer)
        self._clip_gradients(optimizer)
        self._optimizer_step(optimizer, **options)
        self.has_stepped = not strategy.precision.has_skipped_step

    def _clip_gradients(self, optimizer: Optimizer) -> None:
        settings, precision = self._context.options, self._strategy.precision
        limit = settings.gradient_clip_val
        if self._clip is not None:
            with torch.no_grad():  # gradients are views of DDP's buckets, which would keep the graph
                self._clip(optimizer, limit or None, settings.gradient_clip_algorithm)
        elif limit:
            is_norm = settings.gradient_clip_algorithm != "value"
            clip = precision.clip_gradients_norm if is_norm else precision.clip_gradients_value
            clip(optimizer, limit)

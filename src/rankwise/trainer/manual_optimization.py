"""Manual optimisation: `training_step` itself runs backward passes and steps, and gradients stay averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import final

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync import reduce_gradients
from rankwise.trainer.nonfinite import NonFiniteGuard
from rankwise.trainer.shadow_gradients import without_new_gradients

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.trainer import Trainer
    from rankwise.trainer.turns import Turns

__all__ = ["ManualOptimization", "ManualOptimizer", "check_manual"]


def check_manual(trainer: Trainer, module: TrainingModule) -> None:
    """Make sure that a trainer is not asked to do what manual optimisation leaves to the module.

    Raises:
        ConfigurationError: when it is.
    """
    if module.automatic_optimization:
        return
    name = type(module).__name__
    for argument, is_set, remedy in (
        ("accumulate_grad_batches", trainer.accumulate_grad_batches != 1, "step in every n-th training_step"),
        ("gradient_clip_val", bool(trainer.gradient_clip_val), "self.clip_gradients(optimizer, value)"),
        ("gradient_weighting", trainer.strategy.gradient_weighting is not None, "weight the loss"),
        ("comm_hook", trainer.strategy.gradients.hook is not None, "gradients are averaged without it"),
    ):
        if is_set:
            raise ConfigurationError(
                message=f"{argument} has no effect: {name} optimises manually.",
                facts=f"{name}.automatic_optimization is False.",
                remedy=f"leave it out; in training_step: {remedy}.",
            )


@final
class ManualOptimization:
    """Run `training_step`, which calls `manual_backward` and steps optimizers as it likes.

    Backward passes run within the wrapper's forward pass, any number of them, each over a part of the
    parameters: nothing that DDP's own reduction is made for. So DDP is held back, and after each backward
    pass the gradients are averaged here, in few large buckets.

    Args:
        trainer: keeps progress.
        module: the user's.
        wrapped: the same, as the strategy has wrapped it.
        turns: which batches the ranks take together.

    Attributes:
        has_stepped: always False: the module steps its schedulers itself.

    Raises:
        ConfigurationError: when the wrapper has a communication hook, which would never run.
    """

    has_stepped = False

    def __init__(self, trainer: Trainer, module: TrainingModule, wrapped: nn.Module, turns: Turns) -> None:
        _refuse_hooks(wrapped)
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._module = module
        self._wrapped = wrapped
        self._turns = turns
        self._weight = 1.0
        self._guard = NonFiniteGuard(trainer, wrapped)
        ignored: set[str] = getattr(wrapped, "parameters_to_ignore", set())
        self._parameters = [parameter for name, parameter in module.named_parameters() if name not in ignored]
        self._is_blocked = False
        self._has_local_gradients = False
        self._frozen: list[Tensor] = []
        self.optimizers = [ManualOptimizer(self, optimizer) for optimizer in trainer.optimizers]
        trainer.running_manual_optimization = self

    def begin_epoch(self) -> None:
        """Prepare for an epoch: there is nothing to prepare."""

    def run_batch(self, batch: Any, batch_idx: int, is_window_end: bool) -> Any:
        """Return what `training_step` did.

        Collective: every rank must call this.
        """
        if isinstance(self._wrapped, DistributedDataParallel):
            # DDP averages nothing here, but it shall keep buffers the same, which it does before a
            # forward pass that follows one with averaging.
            self._wrapped.require_forward_param_sync = True
        self._weight = self._turns.weight(batch_idx, batch_idx + 1)
        strategy = self._strategy
        held_back = strategy.no_backward_sync(self._wrapped)
        with self._turns.untouched(), held_back, strategy.precision.forward_context():
            return strategy.call_method(self._wrapped, "training_step", batch, batch_idx)

    # ------------------------------------------------------------------ what the module calls

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients, and average them over the ranks unless that is blocked.

        Collective: every rank must call this, unless it is blocked.
        """
        self._module.on_before_backward(loss)
        # The weight is 1, but where ranks have run out of batches.
        is_shadow = self._turns.is_shadow
        with without_new_gradients(self._parameters) if is_shadow else nullcontext():
            self._strategy.backward(self._guard.mark(loss * self._weight), **options)
        if self._is_blocked:
            self._has_local_gradients = True
        else:
            self._average()
        self._module.on_after_backward()

    def _average(self) -> None:
        self._has_local_gradients = False
        group = self._strategy.data_parallel_group
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            reduce_gradients(self._parameters, group)

    @contextmanager
    def blocked(self, enabled: bool = True) -> Iterator[None]:
        """Leave gradients as they are on this rank, for the backward passes of the block."""
        before = self._is_blocked
        self._is_blocked = before or enabled
        try:
            yield
        finally:
            self._is_blocked = before

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Let an optimizer step once, in the trainer's precision; return what its `step` returns.

        Raises:
            ConfigurationError: for a closure with `on_nonfinite`, which must see gradients first.
            NonFiniteLossError: with `on_nonfinite="raise"`.
        """
        if closure is not None and self._trainer.on_nonfinite is not None:
            raise ConfigurationError(
                message="on_nonfinite cannot judge a step whose closure computes the gradients.",
                remedy="leave out the closure, or on_nonfinite.",
            )
        result = None
        with self._agreeing():
            if self._guard.allows_step(optimizer):
                self._strategy.precision.unscale_gradients(optimizer)
                self._module.on_before_optimizer_step(optimizer)
                result = self._strategy.optimizer_step(optimizer, closure)
        self._trainer.progress.global_step += 1
        return result

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Have the ranks ask each other in the block whether to skip, if gradients are each rank's own."""
        precision = self._strategy.precision
        before = precision.agree, self._guard.may_differ
        if self._has_local_gradients and self._strategy.world_size > 1:
            precision.agree = partial(self._strategy.reduce_boolean_decision, all=False)
            self._guard.may_differ = True
        try:
            yield
        finally:
            precision.agree, self._guard.may_differ = before

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer's parameters."""
        self._module.on_before_zero_grad(optimizer)
        self._guard.forget()
        self._strategy.precision.zero_grad(optimizer)

    def toggle(self, optimizer: Optimizer) -> None:
        """Let only this optimizer's parameters require gradients, until `untoggle`."""
        self.untoggle()
        precision = self._strategy.precision
        own = {id(parameter) for parameter in precision.model_parameters(optimizer)}
        for other in self._trainer.optimizers:
            for parameter in precision.model_parameters(other):
                if id(parameter) not in own and parameter.requires_grad:
                    parameter.requires_grad_(False)
                    self._frozen.append(parameter)

    def untoggle(self) -> None:
        """Undo `toggle`; twice does no harm."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen.clear()


@final
class ManualOptimizer:
    """An optimizer whose `step` and `zero_grad` go through the trainer; all else is the optimizer's own.

    Attributes:
        optimizer: torch's.
    """

    def __init__(self, optimization: ManualOptimization, optimizer: Optimizer) -> None:
        self._optimization = optimization
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once, in the trainer's precision; return what the optimizer does.

        Raises:
            NonFiniteLossError: with `on_nonfinite="raise"`.
        """
        return self._optimization.step(self.optimizer, closure)

    def zero_grad(self) -> None:
        """Clear the gradients of the parameters."""
        self._optimization.zero_grad(self.optimizer)

    @contextmanager
    def toggled(self) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients in the block."""
        self._optimization.toggle(self.optimizer)
        try:
            yield
        finally:
            self._optimization.untoggle()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"ManualOptimizer({self.optimizer!r})"


def _refuse_hooks(wrapped: nn.Module) -> None:
    if isinstance(wrapped, DistributedDataParallel) and wrapped._comm_hooks:
        hook: Any = wrapped._comm_hooks[0][0]
        raise ConfigurationError(
            message="A communication hook would never run: manual optimisation averages gradients itself.",
            facts=f"the wrapper has {getattr(hook, '__name__', hook)!r}.",
            remedy="leave out the hook, or automatic_optimization = False.",
        )

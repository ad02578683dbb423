"""Manual optimisation: `training_step` itself runs backward passes and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync import reduce_gradients
from rankwise.gradient_sync.comm_hook import hook_of
from rankwise.gradient_sync.parameters import check_dense, hooked_parameters, share_buffers_next
from rankwise.gradient_sync.tensor_hooks import call_hooks, hooks_kept
from rankwise.process_group.lone_calls import is_after_failure
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import mean_loss
from rankwise.trainer.data.data_module import is_own
from rankwise.trainer.hooks import num_step_arguments
from rankwise.trainer.loops.nonfinite import NonFiniteGuard
from rankwise.trainer.loops.optimizers import optimizer_step_of
from rankwise.trainer.loops.uneven_inputs import discard_new_gradients
from rankwise.trainer.loops.weighting import BatchWeighting, gradients_kept, zero_gradients
from rankwise.trainer.module import TrainerOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.loops.uneven_inputs import BatchSchedule
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.state import LoopContext


def check_manual(module: TrainingModule, strategy: Strategy, settings: TrainerOptions) -> None:
    """Check that no option is set that manual optimisation leaves to the module."""
    if module.automatic_optimization:
        return
    name = type(module).__name__
    for argument, is_set, remedy in (
        ("accumulate_grad_batches", settings.accumulate_grad_batches > 1, "step in every n-th training_step"),
        ("gradient_clip_val", bool(settings.gradient_clip_val), "self.clip_gradients(optimizer, value)"),
    ):
        if is_set:
            raise ConfigurationError(
                message=f"{argument} has no effect: {name} optimises manually.",
                facts=f"{name}.automatic_optimization is False.",
                remedy=f"leave it out; in training_step: {remedy}.",
            )
    if is_own(strategy, Strategy, "gradient_sync_context"):
        raise ConfigurationError(
            message=f"{type(strategy).__name__}.gradient_sync_context() is not called: {name} optimises "
            "manually.",
            remedy="average gradients in sync_gradients(), which is called in each kind of optimisation.",
        )
    hook, weighting = strategy.gradients.hook, strategy.gradients.weighting
    if hook is not None and (hook.is_stateful or weighting == "logged"):
        raise ConfigurationError(
            message=f"comm_hook {hook.name!r} cannot be used here: {name} optimises manually.",
            facts="in manual optimisation a hook may not keep gradients between steps, nor average logged "
            f"weights; gradient_weighting={weighting!r}.",
            remedy='comm_hook="fp16_compress" or "bf16_compress", with gradient_weighting="samples" or None.',
        )
    _check_dense(module, strategy)


def _check_dense(module: nn.Module, strategy: Strategy) -> None:
    if strategy.world_size > 1:
        check_dense(module, f"{type(module).__name__}'s manual optimisation")


@final
class ManualOptimization:
    """Run a `training_step` that calls `manual_backward` and steps optimizers itself.

    The backward passes run during the wrapper's forward pass. There may be any number of them, each over some
    of the parameters, which DDP's own reduction does not support. So DDP's reduction is blocked, and the
    gradients are averaged here after each backward pass, in few large buckets, through the wrapper's
    communication hook if it has one. With `gradient_weighting="samples"`, each `training_step` is a window;
    with `"logged"`, each backward pass is one.
    """

    has_stepped = False  # the module steps its schedulers itself

    def __init__(self, context: LoopContext, schedule: BatchSchedule) -> None:
        self._context = context
        self._strategy = context.strategy
        self._module = context.module
        self._hooks = context.hooks
        context.strategy.gradients.in_hooks = partial(context.stage.random.shared, "tensor hooks")
        self._optimizer_step = optimizer_step_of(context.strategy, context.stage.random)
        own_backward = context.hooks.own("backward")
        self._backward_options = {} if own_backward is None else {"run": own_backward}
        self._step_arguments = num_step_arguments(context.module, "training_step")
        self._wrapped = wrapped = context.wrapped
        self._schedule = schedule
        hook, weighting = hook_of(wrapped), self._strategy.gradient_weighting
        self._hook = None if weighting == "logged" else hook  # a hook would not average the weights
        self._weight: float = 1.0
        self._loss_weight: float | Tensor = 1.0  # of the last backward pass
        self._weights = self._strategy.gradients.new_weights()
        _check_dense(self._module, self._strategy)
        self._guard = None if context.options.on_nonfinite is None else NonFiniteGuard(context)
        self._parameters: list[Tensor] = []
        self._is_blocked = False
        self._local: set[int] = set()  # ids of parameters whose gradients are not averaged over the ranks
        self._cleared: set[int] = set()  # ids of optimizers that cleared gradients since their last step
        self._spent: set[int] = set()  # ids of optimizers that have used gradients which the next step clears
        self._is_in_batch = False
        self._frozen: list[Tensor] = []
        self.weighting = BatchWeighting(context, schedule)
        self.optimizers = [TrainerOptimizer(self, optimizer) for optimizer in context.optimizers]

    def begin_epoch(self) -> None:
        """Read the data for the weights of the epoch's batches."""
        self.weighting.begin_epoch()

    def run_batch(self, batch: Any, batch_idx: int, is_window_end: bool) -> Any:
        """Run `training_step`, and return its outputs. Collective: every rank must call this."""
        share_buffers_next(self._wrapped)
        self.weighting.begin_batch(batch_idx, is_window_end)
        self._weight = self.weighting.factor(batch_idx)
        strategy = self._strategy
        arguments = (batch, batch_idx)[: self._step_arguments]
        self._read_parameters()
        blocked = strategy.no_backward_sync(self._wrapped)
        self._is_in_batch = True
        call = self._schedule.call_method if self._schedule.has_padding else strategy.call_method
        with self._schedule.preserve_state(), blocked, strategy.precision.forward_context():
            outputs = call(self._wrapped, "training_step", *arguments)
        self._is_in_batch = False
        self.weighting.refuse_logged()
        return outputs

    def _read_parameters(self) -> None:
        """Read the parameters again if some were added, frozen or unfrozen; every rank calls this."""
        strategy = self._strategy
        if strategy.world_size == 1 and self._weights is None:
            return  # nothing is averaged, and no gradient is left out
        self._parameters = strategy.gradients.manual_parameters(
            self._wrapped,
            self._context.optimizers,
            strategy.precision.model_parameters,
            strategy.data_parallel_group,
        )

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **options: Any) -> None:
        """Compute gradients; average them over the ranks, which is Collective, unless that is blocked."""
        self._hooks.call("on_before_backward", loss)
        self._loss_weight = factor = self._factor(weight)
        self._read_parameters()
        is_left_out = float(factor) == 0
        weights, sync = self._weights, self._strategy.gradients
        marked = loss if is_left_out or self._guard is None else self._guard.mark(loss)
        with nullcontext() if weights is None else sync.counting(weights):
            weighted = self.weighting.scaled(marked, factor)
        parameters = self._parameters
        hooked = hooked_parameters(parameters) if self._strategy.world_size > 1 else []
        with self._separate_gradients() if weight is not None else nullcontext():
            with (
                hooks_kept(hooked, self._wrapped, is_averaged=not self._is_blocked) as hooks_left,
                discard_new_gradients(parameters) if self._schedule.is_padding else nullcontext(),
                zero_gradients(parameters) if is_left_out else nullcontext(),
            ):
                self._strategy.backward(weighted, **self._backward_options, **options)
            self._spent.clear()
            if self._is_blocked:
                self._local.update(id(each) for each in parameters if each.requires_grad)
            else:
                self._average()
            if hooks_left:
                call_hooks(hooks_left, sync.in_hooks)
        is_kept = self._is_blocked and self._strategy.world_size > 1
        with gradients_kept(parameters, "outside of no_backward_sync") if is_kept else nullcontext():
            self._hooks.call("on_after_backward")

    def _factor(self, weight: float | Tensor | None) -> float | Tensor:
        if self._strategy.gradient_weighting == "logged":
            if weight is None or self._is_blocked:
                what = "has no weight" if weight is None else "has a weight, but is blocked"
                remedy = "self.manual_backward(loss, weight=n), outside of self.no_backward_sync()."
                raise self.weighting.error(f"A backward pass {what}", remedy)
            return 0.0 if self._schedule.is_padding else weight
        if weight is not None:
            raise self.weighting.error("manual_backward got a weight, but gradients are not weighted by it")
        return self._weight

    @contextmanager
    def _separate_gradients(self) -> Iterator[None]:
        """Add the gradients of the block to the earlier ones, which are averaged and weighted, after it."""
        earlier = [(parameter, parameter.grad) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        yield
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _average(self) -> None:
        weights, sync = self._weights, self._strategy.gradients
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        sync.average(trained, self._strategy.data_parallel_group, self._hook, weights)
        if weights is not None:
            weights.close()
        if self._local:
            self._local.difference_update(map(id, trained))

    @contextmanager
    def blocked(self, enabled: bool = True) -> Iterator[None]:
        """Do not average gradients over the ranks in the backward passes of the block."""
        before = self._is_blocked
        self._is_blocked = before or enabled
        try:
            yield
        finally:
            self._is_blocked = before

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step an optimizer once, in the trainer's precision; return what its `step` returns."""
        if closure is not None and self._context.options.on_nonfinite is not None:
            raise ConfigurationError(
                message="on_nonfinite cannot check a step whose closure computes the gradients.",
                remedy="leave out the closure, or on_nonfinite.",
            )
        result = None
        with self._agree_on_skipping(optimizer):
            if self._guard is None or self._guard.allows_step(optimizer):
                self._strategy.precision.unscale_gradients(optimizer)
                self._hooks.call("on_before_optimizer_step", optimizer)
                agreed = None if closure is None else partial(self._agreed_loss, closure)
                result = self._optimizer_step(optimizer, agreed, **options)
        key = id(optimizer)
        (self._spent.add if key in self._cleared else self._spent.discard)(key)
        self._cleared.discard(key)
        self._context.state.progress.global_step += 1
        return result

    def _agreed_loss(self, closure: Callable[[], Any]) -> Any:
        """Call a closure; return the mean of the ranks' losses, by which all optimizers decide the same."""
        with self._context.stage.random.own():
            loss = closure()
        return mean_loss(self._strategy, loss, self._loss_weight)

    @contextmanager
    def _agree_on_skipping(self, optimizer: Optimizer) -> Iterator[None]:
        """Make the ranks agree in the block whether to skip a step, if gradients are not averaged."""
        precision = self._strategy.precision
        before = precision.agree
        is_local = self._local and not self._local.isdisjoint(map(id, precision.model_parameters(optimizer)))
        if is_local and self._strategy.world_size > 1:
            precision.agree = partial(self._strategy.reduce_boolean_decision, all=False)
        try:
            yield
        finally:
            precision.agree = before

    def zero_grad(self, optimizer: Optimizer, **options: Any) -> None:
        """Clear the gradients of an optimizer's parameters."""
        if self._guard is not None:
            self._guard.clear()
        self._cleared.add(id(optimizer))
        self._strategy.precision.zero_grad(optimizer, **options)

    def toggle(self, optimizer: Optimizer) -> None:
        """Make only this optimizer's parameters require gradients, until `untoggle`."""
        self.untoggle()
        parameters_of = self._strategy.precision.model_parameters
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for other in self._context.optimizers:
            for parameter in parameters_of(other):
                if id(parameter) not in own and parameter.requires_grad:
                    parameter.requires_grad_(False)
                    self._frozen.append(parameter)

    def untoggle(self) -> None:
        """Undo `toggle`; a second call has no effect."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen.clear()

    @property
    def toggled(self) -> set[int]:
        """The ids of the parameters that `toggle` has frozen."""
        return set(map(id, self._frozen))

    def pending_gradients(self) -> dict[str, Tensor]:
        """Return the gradients that a later step may use, by parameter name; their mean over the ranks.

        Gradients that a step has used are left out, if the optimizer also cleared them before that step; and
        all within a `training_step`, which a run that continues repeats.
        Collective: every rank must call this; after a failure on this rank they are its own.
        """
        if self._is_in_batch:
            return {}
        strategy, precision = self._strategy, self._strategy.precision
        precision.scale_gradients()
        spent = {
            id(parameter)
            for optimizer in self._context.optimizers
            if id(optimizer) in self._spent
            for parameter in (*precision.main_parameters(optimizer), *precision.model_parameters(optimizer))
        }
        named = self._context.optimizer_set.named_parameters(self._module)
        found = {name: one for name, one in named.items() if id(one) not in spent}
        has_others = strategy.world_size > 1 and not is_after_failure()
        if has_others and strategy.reduce_boolean_decision(bool(self._local), all=False):
            found = {name: _copy_with_gradient(parameter) for name, parameter in found.items()}
            reduce_gradients(found.values(), strategy.data_parallel_group)
        return {name: one.grad.detach() for name, one in found.items() if one.grad is not None}

    def end(self) -> None:
        """Leave the pending gradients, averaged, on the parameters for the next fit. Collective."""
        named = self._context.optimizer_set.named_parameters(self._module)
        for name, gradient in self.pending_gradients().items():
            named[name].grad = gradient


def _copy_with_gradient(parameter: Tensor) -> nn.Parameter:
    """Return a parameter that shares its elements with another, and has a copy of its gradient."""
    copied = nn.Parameter(parameter.detach())
    copied.grad = None if parameter.grad is None else parameter.grad.clone()
    return copied

"""When, how and with which weights gradients are averaged: by a strategy, or in any training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.gradient_sync.buckets import reduce_listed, reduce_with_hook
from rankwise.gradient_sync.comm_hook import CommHook, read_state, state_for_rank, write_state
from rankwise.gradient_sync.hook_registry import (
    HookPlace,
    ModelAveraging,
    NamedHook,
    allreduce_hook,
    check_powersgd_device,
    refuse_distributed_optimizer,
)
from rankwise.gradient_sync.options import (
    GradientSyncMode,
    check_sync_options,
    check_weighting,
    resolve_sync_mode,
)
from rankwise.gradient_sync.parameters import (
    ParametersOf,
    check_dense,
    check_local_changes,
    hooked_parameters,
    parameters_of,
    share_buffers_next,
    trained_parameters,
)
from rankwise.gradient_sync.tensor_hooks import KeptHooks, call_hooks, hooks_kept, refuse_new_hooks
from rankwise.gradient_sync.tracking import TrackedModule, rebuild_reducer
from rankwise.gradient_sync.unused import (
    UnusedParameterMonitor,
    check_finished,
    explain_unused,
    record_reduced_names,
)
from rankwise.gradient_sync.weights import (
    WeightAccumulator,
    WeightCarrier,
    WeightedReduction,
    WeightUnit,
    divide,
    local_gradients_kept,
    weighted,
)
from rankwise.process_group.collectives import all_reduce, has_other_ranks
from rankwise.process_group.lone_calls import is_after_failure
from rankwise.process_group.objects import gather_object

_OF_A_JOB = ("_states", "_averaging", "_modules", "_counting", "_unit", "in_hooks", "sync", "tracking")
HookStates = list[list[dict[str, Any]]]
NoSync = Callable[[nn.Module, bool], AbstractContextManager[Any]]
"""`no_sync(module, enabled)`: a block in which DDP does not average gradients if enabled."""

_NOTHING = nullcontext()
_NO_HOOKS: AbstractContextManager[KeptHooks] = nullcontext([])
# Modules whose static graph DDP has recorded.
_recorded_graphs: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@final
@dataclass(eq=False)
class _OfModule:
    """The objects with which a job averages the gradients of one module."""

    weights: WeightAccumulator | None
    monitor: UnusedParameterMonitor | None = None
    tracked: TrackedModule | None = None
    is_plain: bool = False  # not wrapped, as nothing in it was trained

    @property
    def carrier(self) -> WeightCarrier | None:
        """The parameter that carries the weights in DDP's buckets, if there is one."""
        return None if self.weights is None else self.weights.carrier


@final
class GradientSync:
    """How gradients are averaged. `DDPStrategy` documents the arguments; invalid ones raise."""

    def __init__(
        self,
        *,
        sync_mode: Any = "auto",
        comm_hook: Any = None,
        comm_state: Any = None,
        comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        gradient_weighting: str | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
        needs_ddp: bool = False,
    ) -> None:
        ddp_kwargs = ddp_kwargs or {}
        finds_unused = bool(ddp_kwargs.get("find_unused_parameters"))
        self._needs_ddp = needs_ddp  # to average gradients of a module, in modes other than "forced_sync"
        self.mode = resolve_sync_mode(sync_mode, finds_unused_parameters=finds_unused)
        self._is_forced = self.mode is GradientSyncMode.FORCED_SYNC
        self.hook = CommHook.checked(comm_hook, comm_state, comm_wrapper)
        self.weighting = check_weighting(gradient_weighting)
        self.period = model_averaging_period
        check_sync_options(
            self.mode, self.hook, self.period, self.weighting, is_static=bool(ddp_kwargs.get("static_graph"))
        )
        is_plain = not self._is_forced if self.hook is None else self.hook.is_plain
        # Whether a `WeightCarrier` averages the weights in DDP's buckets. DDP's search would not find it.
        is_copied_or_searched = finds_unused or ddp_kwargs.get("mixed_precision")
        self._has_carrier = self.weighting == "logged" and is_plain and not is_copied_or_searched
        self._saved: HookStates = []  # of a checkpoint or an earlier job, by rank and wrapped module
        self._clear()

    def _clear(self) -> None:
        self._states: list[Any] = []
        self._averaging: ModelAveraging | None = None
        self._modules: weakref.WeakKeyDictionary[nn.Module, _OfModule] = weakref.WeakKeyDictionary()
        self._counting: list[WeightAccumulator] = []
        self.in_hooks: Callable[[], AbstractContextManager[Any]] = nullcontext  # the block of tensor hooks
        self.sync: Callable[[Sequence[Tensor]], object] | None = None  # a strategy's own average of gradients
        self.tracking: dict[str, Any] = {}  # further arguments of `TrackedModule`
        is_compressed = self.hook is not None and not self.hook.is_plain
        self._unit = WeightUnit(is_bounded=is_compressed) if self.weighting == "logged" else None

    @property
    def ddp_defaults(self) -> dict[str, Any]:
        """Defaults of DDP's arguments; with bucket views, dividing gradients takes one kernel per bucket."""
        return {"gradient_as_bucket_view": True} if self._has_carrier else {}

    def check_module(self, module: nn.Module, strategy: Any) -> None:
        """Raise for modules that several ranks cannot train in this mode as one process would."""
        check_local_changes(module, strategy)
        if self.hook is not None and self.hook.is_powersgd:
            check_powersgd_device(strategy.root_device)
        if self._is_forced:
            check_dense(module, 'sync_mode="forced_sync"')

    def prepare(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Let the ranks of `group` agree on a unit if weighted gradients of float16 would overflow."""
        if self._unit is not None:
            self._unit.group = group
            self._unit.is_bounded |= any(each.dtype is torch.float16 for each in trained_parameters(module))

    def wrap(self, module: nn.Module, wrap: Callable[[], Any]) -> Any:
        """Call `wrap()` while the module has the parameter that carries weights; return its result."""
        carrier = WeightCarrier.of(module) if self._has_carrier else None
        if carrier is None:
            return wrap()
        with carrier.attached_to(module):
            wrapped = wrap()
            is_ddp = isinstance(wrapped, DistributedDataParallel)
            is_in = is_ddp and any(each is carrier.total for each in wrapped.parameters())
        if is_in and wrapped.find_unused_parameters:  # a wrapper of the user's: without the carrier, then
            rebuild_reducer(wrapped)
        elif is_in:
            self._modules[wrapped] = _OfModule(self.new_weights(carrier))
        return wrapped

    def new_weights(self, carrier: WeightCarrier | None = None) -> WeightAccumulator | None:
        """Return an accumulator for the windows of one more module; None without logged weights."""
        return None if self._unit is None else WeightAccumulator(self._unit, carrier)

    def _of(self, module: nn.Module) -> _OfModule:
        own = self._modules.get(module)
        if own is None:
            own = self._modules[module] = _OfModule(self.new_weights())
        return own

    def track(
        self, module: nn.Module, group: dist.ProcessGroup | None, *, is_new: bool = False
    ) -> TrackedModule:
        """Track the trained parameters of a module from now on; see `TrackedModule`. Collective."""
        own = self._of(module)
        own.tracked = TrackedModule(module, group, is_new=is_new, **self.tracking)
        own.is_plain = is_new and not isinstance(module, DistributedDataParallel)
        if isinstance(module, DistributedDataParallel):
            module.register_forward_pre_hook(self._before_forward)
        return own.tracked

    def _track_unless_alone(self, module: nn.Module, group: dist.ProcessGroup | None) -> TrackedModule | None:
        """Track a module that is wrapped, or that several ranks train."""
        if isinstance(module, DistributedDataParallel):
            group = module.process_group
        elif not has_other_ranks(group):
            return None
        return self.track(module, group)

    def _before_forward(self, wrapped: DistributedDataParallel, args: object) -> None:
        """Update the parameters that DDP averages, in a loop that does not use `context`."""
        own = self._modules.get(wrapped)
        is_reducing = wrapped.require_backward_grad_sync and torch.is_grad_enabled()
        if is_reducing and own is not None and own.tracked is not None and not own.tracked.is_checked:
            self._update(wrapped, own.tracked)
            own.tracked.end_window()

    def _update(
        self,
        module: nn.Module,
        tracked: TrackedModule,
        optimizers: Sequence[Optimizer] = (),
        parameters_of: ParametersOf = parameters_of,
    ) -> None:
        """Update the set of averaged parameters, before a forward pass."""
        tracked.update(module, optimizers, parameters_of, self._ids_elsewhere)
        if isinstance(module, DistributedDataParallel) and not self._is_forced and tracked.must_rebuild():
            carrier, apart = self._of(module).carrier, tracked.parameters.apart
            with nullcontext() if carrier is None else carrier.attached_to(module.module, apart):
                rebuild_reducer(module, apart)
            record_reduced_names(module, apart)
            _recorded_graphs.discard(module)

    def manual_parameters(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        parameters_of: ParametersOf,
        group: dist.ProcessGroup | None,
    ) -> list[Tensor]:
        """Return the parameters of module and optimizers, frozen or not, for `average`. Collective."""
        tracked = self._of(module).tracked or self.track(module, group)
        # With several optimizers the set of trained parameters changes with each of them.
        tracked.update(module, optimizers, parameters_of, self._ids_elsewhere, accepts_known=True)
        tracked.end_window()
        return tracked.parameters.all

    def averaged_later(self, module: nn.Module) -> list[Tensor]:
        """Return the trained parameters whose gradients are averaged after a window's backward passes."""
        tracked = self._of(module).tracked
        if tracked is None:
            return trained_parameters(module)
        is_by_ddp = isinstance(module, DistributedDataParallel)
        return tracked.others(averaged_by_ddp=is_by_ddp and not self._is_forced)

    def known_parameters(self, module: nn.Module) -> set[int] | None:
        """Return the ids of the parameters that all ranks have shared; None if nobody follows the module."""
        tracked = self._of(module).tracked
        return None if tracked is None else set(map(id, tracked.parameters.all))

    @property
    def averages_nothing(self) -> bool:
        """Whether each rank trains a model of its own, to measure what communication costs."""
        return self.hook is not None and self.hook.is_noop

    def unowned(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the module's trained parameters by name that are in none of the optimizers used with it."""
        tracked = self._of(module).tracked
        unowned = {} if tracked is None else tracked.parameters.unowned
        return {name: each for name, each in unowned.items() if each.requires_grad}

    def _ids_elsewhere(self, module: nn.Module) -> set[int]:
        """Return the ids of the parameters of all modules but one."""
        others = [own.tracked for other, own in self._modules.items() if other is not module]
        return {each for tracked in others if tracked is not None for each in tracked.parameters.inside}

    def attach(self, wrapped: DistributedDataParallel, local_world_size: int) -> None:
        """Configure a wrapped module to average its gradients in this way."""
        own, group = self._of(wrapped), wrapped.process_group
        place = HookPlace(group, min(local_world_size, dist.get_world_size(group)))
        if wrapped.find_unused_parameters and not self._is_forced:
            own.monitor = UnusedParameterMonitor()
        if self._unit is not None:
            self._unit.group = group
        if own.weights is not None and own.carrier is None and not self._is_forced:
            others = allreduce_hook if self.hook is None else self.hook.function
            named = NamedHook(WeightedReduction(own.weights, group, others), averages=True)
            CommHook("weighted", named, {}, None, None).attach(wrapped, place)
        elif self.hook is not None:
            state = self.hook.attach(wrapped, place)
            write_state(state, self._saved_state(len(self._states)))
            self._states.append(state)
            if self.period is not None and self._averaging is None:
                first_local_step = getattr(state, "start_localSGD_iter", 100)  # torch's default
                self._averaging = ModelAveraging(self.period, first_local_step, group)
                self._averaging.steps = self._saved_state(0).get("averaging", [])

    def detach(self) -> None:
        """End a job; keep the states of the hooks for the next one."""
        if own := self.own_states():
            self._saved = [own]
        self._clear()

    def acts_on(self, module: nn.Module, group: dist.ProcessGroup | None) -> bool:
        """Return whether `context` does anything for a module: not on one rank, unless it has weights."""
        own = self._of(module)
        return (own.tracked or self._track_unless_alone(module, group) or own.weights) is not None

    @contextmanager
    def context(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] | Optimizer,
        is_final_microbatch: bool,
        no_sync: NoSync,
        parameters_of: ParametersOf = parameters_of,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[None]:
        """Run a microbatch's forward and backward pass in the block; see `gradient_sync_context`."""
        own = self._of(module)
        tracked = own.tracked or self._track_unless_alone(module, group)
        used = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if tracked is not None:
            self._update(module, tracked, used, parameters_of)
            tracked.is_checked = True
        is_reducing = self._is_reducing(module, is_final_microbatch)
        weights, carrier = own.weights, own.carrier
        before = None if carrier is None else carrier.gradient_of_probe()
        counting = _NOTHING if weights is None else self.counting(weights)
        is_first = is_reducing and not is_final_microbatch and self.mode is GradientSyncMode.SINGLE_AUTO_SYNC
        kept = local_gradients_kept(module, weights) if is_first else _NOTHING
        trained = () if tracked is None or self.averages_nothing else tracked.parameters.all
        hooked = hooked_parameters(trained)
        hooks = hooks_kept(hooked, module, is_averaged=is_final_microbatch) if hooked else _NO_HOOKS
        try:
            with kept, counting, hooks as hooks_left, no_sync(module, not is_reducing):
                yield
        except RuntimeError as error:
            if isinstance(module, DistributedDataParallel) and (found := explain_unused(error, module)):
                raise found from None
            raise
        finally:
            if tracked is not None:
                tracked.is_checked = False
        is_averaged = isinstance(module, DistributedDataParallel) and is_reducing
        if isinstance(module, DistributedDataParallel) and is_averaged:
            if own.weights is None:
                check_finished(module)
            else:
                own.weights.check_averaged(module, before)
        if is_final_microbatch:
            self._end_window(module, own, used, parameters_of, group, is_averaged=is_averaged)
        if now_hooked := hooked_parameters(trained):
            refuse_new_hooks(set(now_hooked).difference(hooked), module)
            call_hooks(hooks_left, self.in_hooks)
        if isinstance(module, DistributedDataParallel) and is_averaged and own.monitor is not None:
            own.monitor.record(module, is_final_microbatch)

    def _end_window(
        self,
        module: nn.Module,
        own: _OfModule,
        optimizers: Sequence[Optimizer],
        parameters_of: ParametersOf,
        group: dist.ProcessGroup | None,
        *,
        is_averaged: bool,
    ) -> None:
        """Average the gradients that DDP has not averaged, and divide all of them by the window's weights."""
        if own.tracked is not None:  # the forward pass may have changed something
            own.tracked.update(module, optimizers, parameters_of, self._ids_elsewhere, is_window_end=True)
            others = own.tracked.others(averaged_by_ddp=is_averaged)
            own.tracked.end_window()
        elif own.weights is not None:
            others = trained_parameters(module, optimizers, parameters_of)
        else:
            return
        if isinstance(module, DistributedDataParallel) and is_averaged:
            if self.sync is not None:
                self.sync(others)
            elif others:
                reduce_listed(others, module.process_group)
            if own.weights is not None:
                own.weights.divide(module, others)
        else:
            self._reduce_now(module, others, group)
        if own.weights is not None:
            own.weights.close()

    def _is_reducing(self, module: nn.Module, is_final_microbatch: bool) -> bool:
        """Return whether DDP averages gradients in this microbatch."""
        if self._is_forced:
            return False
        if is_final_microbatch or self.mode is GradientSyncMode.MULTI_AUTO_SYNC:
            return True
        # DDP records a static graph in its first backward pass, and fails if that one does not average. What
        # it averages there is not used: it would be rounded twice, in this window and in no other.
        is_first = bool(getattr(module, "static_graph", False)) and module not in _recorded_graphs
        if is_first:
            _recorded_graphs.add(module)
        return is_first

    def _reduce_now(
        self, module: nn.Module, parameters: list[Tensor], group: dist.ProcessGroup | None
    ) -> None:
        """Average the gradients that DDP has not averaged."""
        own = self._of(module)
        needs_ddp = self._needs_ddp and not self._is_forced and not own.is_plain
        if isinstance(module, DistributedDataParallel):
            group = module.process_group
        elif needs_ddp and parameters and has_other_ranks(group):
            raise InvalidTypeError(
                argument="module",
                value=module,
                expected="the module that setup_module() returned, or one that DDP has wrapped",
                remedy='module = strategy.setup_module(module), or mode="forced_sync".',
            )
        self.average(parameters, group, weights=own.weights)
        share_buffers_next(module)

    def average(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        hook: Callable[[Any], Any] | None = None,
        weights: WeightAccumulator | None = None,
    ) -> None:
        """Average gradients without DDP, with the window's weights, or with a hook, on every rank."""
        weight = None if weights is None or not weights.is_used else weights.take()
        if parameters and has_other_ranks(group):
            if self.sync is not None:
                self.sync(parameters)
                weight = None if weight is None else all_reduce(weight, group)
            elif hook is not None:
                reduce_with_hook(parameters, hook, group)
            else:
                weight = reduce_listed(parameters, group, weight=weight)
        if weights is not None and weight is not None:
            weights.store_mean(weight)
            divide(parameters, weight)

    @contextmanager
    def counting(self, weights: WeightAccumulator) -> Iterator[None]:
        """Also count the weights of the losses in the block in a module's window."""
        weights.is_weighted = False
        self._counting.append(weights)
        try:
            yield
        finally:
            self._counting.remove(weights)

    def weight_loss(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return the loss times its weight, and count the weight for every module whose block is open."""
        if self._unit is None:
            raise ConfigurationError(
                message="A loss was given a weight, but nothing asks for weights.",
                facts=f"gradient_weighting={self.weighting!r}.",
                remedy='DDPStrategy(gradient_weighting="logged").',
            )
        number = self._unit.counted(weight)
        if not self._counting:
            raise ConfigurationError(
                message="A loss was given a weight outside of the block that averages its gradients.",
                remedy="with strategy.gradient_sync_context(module): strategy.weighted_loss(loss, weight)"
                ".backward(), for every microbatch.",
            )
        zeros = [zero for weights in self._counting if (zero := weights.add(number)) is not None]
        return weighted(loss, number, zeros)

    def reach_carrier(self, wrapped: nn.Module, loss: Tensor) -> Tensor:
        """Return a loss of zero whose backward pass also reaches the module's `WeightCarrier`."""
        carrier = self._of(wrapped).carrier
        return loss if carrier is None else weighted(loss, 0.0, [carrier.add(0.0, is_first=True)])

    def abandon_window(self, module: nn.Module) -> None:
        """Forget the microbatches since the last step of an optimizer, whose gradients will not be used."""
        own = self._of(module)
        if own.tracked is not None:
            own.tracked.end_window()
        if own.weights is not None and own.weights.is_used:
            own.weights.close()

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise for optimizers that do not work with model averaging, where it is used."""
        for optimizer in optimizers if self.period is not None else ():
            refuse_distributed_optimizer(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Average the model if the period is over."""
        if self._averaging is not None:
            self._averaging.after_step(optimizer)

    def average_models(self) -> None:
        """Give all ranks the mean of their models, if a hook has let them diverge. Collective.

        After a failure on this rank its own model stays.
        """
        if self._averaging is not None and not is_after_failure():
            self._averaging.average_now()

    def own_states(self) -> list[dict[str, Any]]:
        """Return the states of this rank's hooks, by wrapped module; [] if all are empty."""
        states = [read_state(state) for state in self._states]
        if self._averaging is not None and states:
            states[0]["averaging"] = self._averaging.steps
        return states if any(states) else []

    def gathered_states(self) -> HookStates:
        """Return all ranks' states on rank 0, [] elsewhere; after a failure this rank's own. Collective."""
        own = self.own_states()
        if not dist.is_initialized() or not self._states or is_after_failure():
            return [own] if own else self._saved
        if all(isinstance(state, (dist.ProcessGroup, type(None))) for state in self._states):
            return []
        gathered = gather_object(own) or []
        return gathered if any(gathered) else []

    def load_states(self, states: HookStates) -> None:
        """Restore what `gathered_states` returned on rank 0, now or for the next job."""
        self._saved = states
        for number, state in enumerate(self._states):
            write_state(state, self._saved_state(number))
        if self._averaging is not None:
            self._averaging.steps = self._saved_state(0).get("averaging", [])

    def reload_states(self) -> None:
        """Restore the states with which the job began, if it began with any."""
        self.load_states(self._saved)

    def _saved_state(self, number: int) -> dict[str, Any]:
        """Return the saved state of this rank and a wrapped module; {} for none."""
        by_rank = [states[number] for states in self._saved if number < len(states)]
        return state_for_rank(by_rank, dist.get_rank(), dist.get_world_size()) if by_rank else {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the objects of a job, which belong to a process group."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_A_JOB}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()


def gradient_sync_context(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    is_final_microbatch: bool = True,
    mode: GradientSyncMode | str = "auto",
    group: dist.ProcessGroup | None = None,
) -> AbstractContextManager[None]:
    """Compute gradients in the block, and average them over the ranks after the window's last microbatch.

    Works with any `DistributedDataParallel` in any training loop. It does nothing without a process group,
    and with `forced_sync` the module need not be wrapped. If the block raises, nothing is averaged after
    it.

    Collective: every rank must enter it, with the same mode and parameters. In the window's last microbatch
    (with `multi_auto_sync` in each one) the ranks wait for each other.

    Args:
        module: the wrapped module.
        optimizers: `forced_sync` also averages their parameters that the module does not list.
        is_final_microbatch: whether the optimizers step next.
        mode: when gradients are averaged.
        group: for a module that is not wrapped, the ranks to average over; all of them by default.

    Raises:
        UnknownNameError: for an unknown mode.
        InvalidTypeError: for a module that is not wrapped with DDP, in a mode that needs DDP.
        UnusedParametersError: when the loss does not depend on some parameters, and DDP does not look for
            unused ones.
    """
    finds_unused = bool(getattr(module, "find_unused_parameters", False))
    sync = _sync_in(resolve_sync_mode(mode, finds_unused_parameters=finds_unused))
    return sync.context(module, optimizers, is_final_microbatch, _no_sync, group=group)


@cache
def _sync_in(mode: GradientSyncMode) -> GradientSync:
    return GradientSync(sync_mode=mode, needs_ddp=True)


def _no_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()

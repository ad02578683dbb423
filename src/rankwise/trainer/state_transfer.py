"""Training state: sent back to the calling process, and each rank's part of a checkpoint."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from rankwise.checkpoint.base import restored_from
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.nested import map_tensors, to_device
from rankwise.process_group.after_failure import is_after_failure
from rankwise.processes.changed_attributes import AttributesBefore
from rankwise.processes.fork_safety import optimizers_without_dynamo
from rankwise.processes.module_state import (
    ModuleBefore,
    ModuleState,
    ObjectState,
    named_parts,
    warn_of_lost_attributes,
)
from rankwise.processes.shared_memory import send_by_name
from rankwise.seed import get_random_state, mixed_seed, seed_process, set_random_state
from rankwise.trainer.metrics.metric_objects import (
    merged,
    metric_objects,
    saved_states,
    set_states,
    unmergeable,
)
from rankwise.trainer.metrics.results import Results

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.state import LoopContext, TrainerState

_METRICS = {  # keys in checkpoints, and attributes of `PublishedMetrics`
    "callback_metrics": "callback",
    "logged_metrics": "logged",
    "_progress_bar_metrics": "progress_bar",
}


@final
@dataclass
class CallerState:
    """What the calling process gets after a stage that ran in other processes; picklable, on the CPU."""

    module: ModuleState
    datamodule: ObjectState | None
    attributes: list[ObjectState]  # of the callbacks
    profiler: ObjectState  # what rank 0, or the first rank of the caller's node, has measured
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    callbacks: list[dict[str, Any]]
    loggers: list[dict[str, Any]]
    precision: dict[str, Any]
    trainer: TrainerState
    comm_hooks: list[list[dict[str, Any]]]  # of each rank
    gradients: dict[str, Tensor] | None  # that a manual fit has left; None after another stage
    has_optimizers: bool  # whether they can exist without a process group; sharded ones cannot


@final
class KnownToCaller:
    """What the calling process has, too, when a stage starts in this one.

    Attributes:
        module: the module as it is then.
        datamodule: the attributes of the data module, if there is one.
        of_callbacks: those of each callback.
        profiler: those of the profiler.
    """

    def __init__(self, context: LoopContext) -> None:
        self.named = named_objects(context)
        self.callbacks, self.loggers = list(context.callbacks), list(context.loggers)
        self.module = ModuleBefore(context.module, self.named)
        data = context.datamodule
        self.datamodule = None if data is None else AttributesBefore(data, self.named)
        self.of_callbacks = [AttributesBefore(callback, self.named) for callback in self.callbacks]
        self.profiler = AttributesBefore(context.profiler, self.named)


def capture(context: LoopContext, known: KnownToCaller) -> CallerState | None:
    """Return the state on each node's first rank, for the calling process there; None on the others.

    Moves the module to the CPU. What the calling process has is sent by name. Collective: every rank must
    call this, as sharded optimizers gather their state.
    """
    strategy, module = context.strategy, context.module
    module.cpu()
    states = context.optimizer_set.states(strategy) if context.stage.name == "fit" else None
    optimizers, schedulers = states or ([], [])
    is_manual_fit = context.stage.name == "fit" and not module.automatic_optimization
    gradients = context.optimizer_set.gradients(module) if is_manual_fit else None
    comm_hooks = strategy.comm_hook_states()
    if strategy.num_nodes > 1:  # only global rank 0 has the whole state of a sharded optimizer
        optimizers = strategy.broadcast(optimizers)
    if strategy.local_rank != 0:
        return None
    send_by_name(known.named)
    state = ModuleState(module, known.module)
    datamodule = None if known.datamodule is None else ObjectState(context.datamodule, known.datamodule)
    attributes = list(map(ObjectState, known.callbacks, known.of_callbacks))
    if strategy.is_global_zero:
        others = [] if datamodule is None else [("datamodule", datamodule)]
        others += zip((type(callback).__name__ for callback in known.callbacks), attributes, strict=True)
        warn_of_lost_attributes(state, others)
    return CallerState(
        module=state,
        datamodule=datamodule,
        attributes=attributes,
        profiler=ObjectState(context.profiler, known.profiler),
        optimizers=_on_cpu(optimizers),
        schedulers=_on_cpu(schedulers),
        callbacks=_on_cpu([callback.state_dict() for callback in known.callbacks]),
        loggers=[logger.state_dict() for logger in known.loggers],
        precision=_on_cpu(strategy.precision.state_dict()),
        trainer=_on_cpu(context.state),
        comm_hooks=_on_cpu(comm_hooks),
        gradients=_on_cpu(gradients),
        has_optimizers=bool(optimizers and context.optimizers),  # an evaluation brings no states back
    )


def _on_cpu(state: Any) -> Any:
    return map_tensors(state, lambda tensor: tensor.detach().cpu())


def restore(context: LoopContext, state: CallerState) -> None:
    """Give the calling process's objects the worker's state; parameters keep their identity."""
    module = context.module
    state.module.restore(module)
    if state.datamodule is not None and context.datamodule is not None:
        state.datamodule.give_to(context.datamodule)
    for field in dataclasses.fields(state.trainer):
        setattr(context.state, field.name, getattr(state.trainer, field.name))
    for callback, attributes, saved in zip(context.callbacks, state.attributes, state.callbacks, strict=True):
        attributes.give_to(callback)
        callback.load_state_dict(saved)
    state.profiler.give_to(context.profiler)
    for logger, saved in zip(context.loggers, state.loggers, strict=True):
        logger.load_state_dict(saved)
    context.strategy.load_comm_hook_states(state.comm_hooks)
    if state.has_optimizers:
        with optimizers_without_dynamo():
            context.optimizer_set.create(module, context.strategy)
            try:
                context.optimizer_set.load(state.optimizers, state.schedulers)
            except ConfigurationError:  # a parameter exists in the other process only: the next fit will say
                context.optimizer_set.keep_states(state.optimizers, state.schedulers)
    elif state.optimizers:
        context.optimizer_set.keep_states(state.optimizers, state.schedulers)
    context.strategy.precision.load_state_dict(state.precision)
    if state.gradients is not None:
        context.optimizer_set.set_gradients(module, state.gradients)


def named_objects(context: LoopContext) -> dict[str, object]:
    """Return the `named_parts` of a module and what its attributes may refer to, by such names."""
    return {
        **named_parts(context.module),
        "trainer": context.hooks.trainer,
        **({} if context.datamodule is None else {"datamodule": context.datamodule}),
        "strategy": context.strategy,
        **{f"callback {number}": callback for number, callback in enumerate(context.callbacks)},
        **{f"logger {number}": logger for number, logger in enumerate(context.loggers)},
    }


def gather_rank_states(context: LoopContext) -> list[dict[str, Any]]:
    """Return what each rank needs to continue from here; outside of a fit, from the end of the last one.

    Collective: within a fit, every rank must call this; after a failure on this rank it returns its own part.
    """
    if context.stage.name != "fit" and context.state.rank_states:
        return context.state.rank_states
    results, before = context.stage.epoch_results, context.stage.before_validation
    # A run that continues from within a validation validates again.
    is_validated = context.state.progress.is_validated
    changing = changing_state(context) if before is None or is_validated else before
    own = {
        **to_device(changing, "cpu"),
        "results": None if results is None else results.state_dict(),
        "metrics": {key: dict(getattr(context.state.fit_metrics, name)) for key, name in _METRICS.items()},
    }
    if is_after_failure():
        return [own]
    return context.strategy.all_gather_object(own, context.strategy.job_group)


def changing_state(context: LoopContext) -> dict[str, Any]:
    """Return what evaluation changes of a rank's part of a checkpoint."""
    results = context.stage.epoch_results
    computed = {} if results is None else results.object_states
    return {
        "random": get_random_state(context.strategy.root_device),
        "metric_objects": {**saved_states(context.module), **computed},
    }


def seed_rank(strategy: Strategy, seed: int, global_step: int) -> None:
    """Seed this rank's random generators with a number that depends on the seed, the step and the rank."""
    seed_process(mixed_seed(seed, global_step, strategy.global_rank), strategy.root_device)


@final
class RankState:
    """This rank's part of a checkpoint; `states` is what `gather_rank_states` returned for it.

    `source` is the checkpoint's path, or other words for it. Another number of ranks shares the parts:
    metrics are merged, and each rank gets a new random stream.
    """

    def __init__(self, context: LoopContext, states: list[dict[str, Any]], source: str) -> None:
        strategy = context.strategy
        self._source = source
        self._strategy = strategy
        self._state = context.state
        self._module = context.module
        self._is_same_world = len(states) == strategy.world_size
        self._shares = [states[rank :: strategy.world_size] for rank in range(strategy.world_size)]
        self._states = self._shares[strategy.global_rank]
        self._any_state = states[0]

    def restore_metrics(self) -> None:
        """Restore the last values of everything logged."""
        own = self._states[0] if self._states else self._any_state
        with restored_from(self._source, "metrics"):
            for key, name in _METRICS.items():
                values = dict(own["metrics"][key])
                if odd := [value for value in values.values() if not isinstance(value, Tensor)]:
                    raise TypeError(f"{odd[0]!r} is no tensor")
                setattr(self._state.fit_metrics, name, values)

    def restore_metric_objects(self) -> None:
        """Restore the module's metric objects; raise CheckpointError where a rank cannot continue several."""
        with restored_from(self._source, "metric objects"):
            self._restore_metric_objects()

    def _restore_metric_objects(self) -> None:
        metrics = metric_objects(self._module)
        shares = [[state["metric_objects"] for state in share] for share in self._shares]
        if odd := sorted({name for share in shares for name in unmergeable(metrics, share)}):
            raise CheckpointError(
                path=self._source,
                problem=f"holds states of the metric objects {odd} that fewer ranks cannot continue",
                remedy=f"continue on {len(self._shares)} ranks, or from the end of an epoch.",
            )
        found = {name for share in shares for states in share for name in states}
        if (lost := sorted(found - metrics.keys())) and self._strategy.is_global_zero:
            warnings.warn(
                f"{self._source} has states of metric objects that the module has not: {lost}.", stacklevel=2
            )
        set_states(metrics, merged(metrics, shares[self._strategy.global_rank]))

    def results(self) -> Results:
        """Return what was logged in the epoch so far."""
        results = Results(self._module, is_evaluation=False, global_rank=self._strategy.global_rank)
        with restored_from(self._source, "logged values"):
            for state in self._states:
                if state["results"] is not None:
                    results.add_state_dict(state["results"])
        return results

    def restore_random(self) -> None:
        """Restore the random state; if the number of ranks has changed, seed it."""
        if self._is_same_world:
            with restored_from(self._source, "random state"):
                set_random_state(self._states[0]["random"], self._strategy.root_device)
        else:
            seed_rank(self._strategy, self._state.seed, self._state.progress.global_step)

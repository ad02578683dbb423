"""Training state: sent back to the calling process, and each rank's part of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import Tensor

from rankwise.callbacks import Callback
from rankwise.checkpoint.base import restored_from
from rankwise.errors import CheckpointError
from rankwise.loggers import Logger
from rankwise.nested import to_device
from rankwise.process_group.lone_calls import is_after_failure
from rankwise.processes.returned_state import KnownToCaller, ReturnedState, StateBefore, captured
from rankwise.ranks import warn
from rankwise.seed import set_random_state
from rankwise.trainer.metrics.metric_objects import (
    merged,
    metric_objects,
    saved_states,
    set_states,
    unmergeable,
)
from rankwise.trainer.metrics.results import Results
from rankwise.trainer.state import LoopContext, TrainerState, seed_rank

_METRICS = {  # keys in checkpoints, and attributes of `PublishedMetrics`
    "callback_metrics": "callback",
    "logged_metrics": "logged",
    "_progress_bar_metrics": "progress_bar",
}
_WITH_STATE = (Callback, Logger)


def known_to_caller(context: LoopContext) -> KnownToCaller:
    """Return the objects of a stage that the calling process also has."""
    objects = [*context.callbacks, *context.loggers]
    kinds = [type(each).__name__ for each in objects]
    names = [
        kind if kinds.count(kind) == 1 else f"{kind} {kinds[:number].count(kind) + 1}"
        for number, kind in enumerate(kinds)
    ]
    owners = {"profiler": context.profiler, **dict(zip(names, context.callbacks, strict=False))}
    if context.datamodule is not None:
        owners = {"datamodule": context.datamodule, **owners}
    loggers = zip(names[len(context.callbacks) :], context.loggers, strict=True)  # their state is enough
    others = {"trainer": context.trainer, "strategy": context.strategy, **dict(loggers)}
    return KnownToCaller(context.module, owners, others)


def state_before(context: LoopContext) -> StateBefore | None:
    """Return the state when a stage starts, on each node's first rank; None on the others."""
    return StateBefore(known_to_caller(context)) if context.strategy.local_rank == 0 else None


def _with_states(known: KnownToCaller) -> dict[str, Any]:
    """Return the callbacks and loggers by the names of what is sent of them."""
    objects = {**known.owners, **known.others}
    return {f"state of {name}": each for name, each in objects.items() if isinstance(each, _WITH_STATE)}


def capture(context: LoopContext, before: StateBefore | None) -> ReturnedState | None:
    """Return the state for the calling process on the rank that has `before`; None on the others.

    Moves the module to the CPU. Collective: sharded optimizers gather their state.
    """
    strategy, module = context.strategy, context.module
    module.cpu()
    optimizers = _optimizer_states(context)
    comm_hooks = strategy.gradients.gathered_states()
    if strategy.num_nodes > 1:  # only global rank 0 has the whole state of a sharded optimizer
        optimizers = strategy.broadcast(optimizers)
    if before is None:
        return None
    is_manual_fit = context.stage.name == "fit" and not module.automatic_optimization
    parts: dict[str, Callable[[], Any]] = {
        "progress and metrics": lambda: context.state,
        **{name: each.state_dict for name, each in _with_states(before.known).items()},
        "communication hooks": lambda: comm_hooks,
        "optimizers": lambda: optimizers,
        "precision": strategy.precision.state_dict,
        "gradients": lambda: context.optimizer_set.gradients(module) if is_manual_fit else None,
    }
    return ReturnedState(before, parts)


def _optimizer_states(context: LoopContext) -> Any:
    """Return the states of a fit's optimizers and schedulers, and whether these can exist in the caller."""
    strategy, optimizers = context.strategy, context.optimizer_set

    def found() -> Any:
        states = optimizers.states(strategy) if context.stage.name == "fit" else None
        return None if states is None else (*states, bool(states[0] and context.optimizers))

    is_sharded = any(map(strategy.is_sharded, context.optimizers))  # they need a process group: collective
    return found() if is_sharded else captured(found)


def restore(context: LoopContext, state: ReturnedState) -> None:
    """Give the calling process's objects the worker's state; parameters keep their identity.

    A part that cannot be returned stays as it is, with a warning that names it.
    """
    strategy, known = context.strategy, known_to_caller(context)
    give: dict[str, Callable[[Any], object]] = {
        "progress and metrics": partial(_restore_progress, context),
        **{name: each.load_state_dict for name, each in _with_states(known).items()},
        "communication hooks": strategy.gradients.load_states,
        "optimizers": partial(_restore_optimizers, context),
        "precision": strategy.precision.load_state_dict,
        "gradients": partial(_restore_gradients, context),
    }
    if "optimizers" in state.restore(known, give):
        context.optimizer_set.forget()


def _restore_progress(context: LoopContext, state: TrainerState) -> None:
    for field in dataclasses.fields(state):
        setattr(context.state, field.name, getattr(state, field.name))


def _restore_optimizers(context: LoopContext, states: tuple[list[Any], list[Any], bool] | None) -> None:
    if states is None:  # an evaluation brings none back
        return
    *saved, can_exist = states
    if can_exist:
        context.optimizer_set.take_states(context.module, context.strategy, *saved)
    elif saved[0]:
        context.optimizer_set.keep_states(*saved)


def _restore_gradients(context: LoopContext, gradients: dict[str, Tensor] | None) -> None:
    if gradients is not None:  # a manual fit has left them
        is_whole = gradients.keys() <= dict(context.module.named_parameters()).keys()
        optimizer_set = context.optimizer_set if is_whole else context.optimizer_set.created
        optimizer_set.set_gradients(context.module, gradients)


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
        "random": context.stage.random.own_state(context.strategy.root_device),
        "metric_objects": {**saved_states(context.module), **computed},
    }


@final
class RankState:
    """This rank's part of a checkpoint; `states` is what `gather_rank_states` returned for it.

    `source` is the checkpoint's path, or other words for it. Another number of ranks shares the parts:
    metrics are merged, and each rank gets a new random stream.
    """

    def __init__(self, context: LoopContext, states: list[dict[str, Any]], source: str) -> None:
        self._context = context
        self._strategy = strategy = context.strategy
        self._source = source
        self._is_same_world = len(states) == strategy.world_size
        self._shares = [states[rank :: strategy.world_size] for rank in range(strategy.world_size)]
        self._states = self._shares[strategy.global_rank]
        self._some_state = (self._states or states)[0]

    def restore_metrics(self) -> None:
        """Restore the last values of everything logged."""
        with restored_from(self._source, "metrics"):
            for key, name in _METRICS.items():
                values = dict(self._some_state["metrics"][key])
                if odd := [value for value in values.values() if not isinstance(value, Tensor)]:
                    raise TypeError(f"{odd[0]!r} is not a tensor")
                setattr(self._context.state.fit_metrics, name, values)

    def restore_metric_objects(self) -> None:
        """Restore the module's metric objects; raise CheckpointError where a rank cannot continue several."""
        with restored_from(self._source, "metric objects"):
            metrics = metric_objects(self._context.module)
            shares = [[state["metric_objects"] for state in share] for share in self._shares]
            if odd := sorted({name for share in shares for name in unmergeable(metrics, share)}):
                raise CheckpointError(
                    path=self._source,
                    problem=f"holds states of the metric objects {odd} that fewer ranks cannot continue",
                    remedy=f"continue on {len(self._shares)} ranks, or from the end of an epoch.",
                )
            found = {name for share in shares for states in share for name in states}
            if (lost := sorted(found - metrics.keys())) and self._strategy.is_global_zero:
                warn(f"{self._source} has states of metric objects that the module has not: {lost}.")
            set_states(metrics, merged(metrics, shares[self._strategy.global_rank]))

    def results(self) -> Results:
        """Return the values logged in the epoch so far."""
        results = Results(self._context.module, is_evaluation=False, global_rank=self._strategy.global_rank)
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
            seed_rank(self._strategy, self._context.state.seed, self._context.state.progress.global_step)

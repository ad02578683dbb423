"""Metric objects of torchmetrics: what their updates change, merged over the ranks, saved and restored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError
from rankwise.nested import to_device

Metrics = dict[str, Any]  # metric objects by their dotted names in a module
State = dict[str, Any]  # of one metric object: its states by name, and what it has of the following
States = dict[str, State]  # by the dotted names of the metric objects

_COUNT, _SEEN, _LEAST, _MOST = "_update_count", "_num_vals_seen", "min_val", "max_val"
_BESIDE_STATES = (_COUNT, _SEEN, _LEAST, _MOST)  # of all, of `Running`, and of `MinMaxMetric`


def _is_a(value: object, name: str) -> bool:
    """Return whether a value is an instance of a class of torchmetrics. Does not import torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, getattr(torchmetrics, name))


def is_metric_object(value: object) -> bool:
    """Return whether a value is a metric of torchmetrics."""
    return _is_a(value, "Metric")


def items_of(dictionary: Mapping[str, Any] | nn.ModuleDict) -> Iterable[tuple[str, Any]]:
    """Return the items of a dictionary; of a `MetricCollection` with the states that its metrics share."""
    items: Callable[..., Iterable[tuple[str, Any]]] = dictionary.items
    return items(copy_state=False) if _is_a(dictionary, "MetricCollection") else items()


def metric_objects(module: nn.Module, within: Iterable[nn.Module] | None = None) -> Metrics:
    """Return the metric objects in a module, each once; with `within`, only these and those in them."""
    if "torchmetrics" not in sys.modules:
        return {}
    for submodule in module.modules():
        if _is_a(submodule, "MetricCollection"):
            items_of(submodule)  # type: ignore[arg-type]  # gives all metrics of a group its states
    wanted = None if within is None else {id(part) for metric in within for part in metric.modules()}
    return {
        name: part
        for name, part in module.named_modules()
        if is_metric_object(part) and (wanted is None or id(part) in wanted)
    }


def check_is_part(metric: Any, logged_as: str, module: nn.Module) -> None:
    """Raise ConfigurationError unless a metric object is in a module."""
    if not any(part is metric for part in module.modules()):
        name, kind = type(module).__name__, type(metric).__name__
        raise ConfigurationError(
            message=f"log({logged_as!r}) got a metric object that is not part of {name}.",
            facts="rankwise moves, saves and restores those that are submodules.",
            remedy=f"self.{logged_as} = {kind}(...) in {name}.__init__, and log that object.",
        )


def states_of(metrics: Metrics) -> States:
    """Return copies of the states, detached."""
    return {name: _state_of(metric) for name, metric in metrics.items()}


def saved_states(module: nn.Module) -> States:
    """Return copies of the states of the metric objects that have been updated."""
    metrics = metric_objects(module)
    return {name: state for name, state in states_of(metrics).items() if _is_updated(metrics[name], state)}


def set_states(metrics: Metrics, states: States) -> None:
    """Give metric objects these states; reset those that have none."""
    for name in metrics.keys() - states.keys():
        metrics[name].reset()
    for name in metrics.keys() & states.keys():
        metric = metrics[name]
        for key in states[name].keys() & {*metric._defaults, *_BESIDE_STATES}:
            setattr(metric, key, to_device(states[name][key], metric.device))
        metric._computed = None


@contextmanager
def states_kept(module: nn.Module) -> Iterator[None]:
    """Restore the states of the metric objects in a module after the block."""
    metrics = metric_objects(module)
    states = states_of(metrics)
    try:
        yield
    finally:
        set_states(metrics, states)


def _state_of(metric: Any) -> State:
    state = {name: _copied(value) for name, value in metric.metric_state.items()}
    beside = {name: vars(metric)[name] for name in _BESIDE_STATES if name in vars(metric)}
    return {**beside, **state}  # a metric may have a state with such a name


def _copied(value: Any) -> Any:
    """Return a copy of a state: updates change tensors in place, but not those in lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [item.detach() if isinstance(item, Tensor) else item for item in value]


def _is_updated(metric: Any, state: State) -> bool:
    """Return whether a state is after an update; a wrapper of torchmetrics does not count its own."""
    if state[_COUNT] or (_LEAST in state and _LEAST not in metric._defaults):
        return True
    return any(_differs(state[name], default) for name, default in metric._defaults.items())


def _differs(value: Any, default: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(default, Tensor):
        return value.shape != default.shape or not torch.equal(value.cpu(), default.cpu())
    return len(value) > 0


# ------------------------------------------------------------------------------------------ merging


@contextmanager
def merged_states(metrics: Metrics, by_rank: Sequence[States]) -> Iterator[None]:
    """Give metric objects the states of all ranks in the block, in which they do not communicate."""
    names = ("_computed", "distributed_available_fn", _COUNT, _SEEN)
    kept = [
        (metric, {name: vars(metric)[name] for name in (*metric._defaults, *names) if name in vars(metric)})
        for metric in metrics.values()
    ]
    try:
        set_states(metrics, merged(metrics, by_rank))
        for metric in metrics.values():
            metric.distributed_available_fn = _never  # no lambda: compute() may pickle the metric
        yield
    finally:
        for metric, values in kept:
            metric.__dict__.update(values)


def _never() -> bool:
    return False


@contextmanager
def empty_lists_refused(metrics: Metrics, remedy: str) -> Iterator[None]:
    """Raise if a metric object communicates in the block while its lists are empty here.

    Other ranks exchange more tensors.
    """

    def refuse(name: str, metric: Any) -> bool:
        raise ConfigurationError(
            message=f"The metric object {name!r} cannot be computed by hand: this rank has seen no batch.",
            facts=f"{type(metric).__name__} exchanges a tensor for each list that is not empty.",
            remedy=remedy,
        )

    with ExitStack() as stack:
        for name, metric in metrics.items():
            defaults = metric._defaults.items()
            if any(isinstance(default, list) and not getattr(metric, state) for state, default in defaults):
                stack.callback(setattr, metric, "distributed_available_fn", metric.distributed_available_fn)
                metric.distributed_available_fn = partial(refuse, name, metric)
        yield


def merged(metrics: Metrics, by_rank: Sequence[States]) -> States:
    """Return the states after the updates of all ranks."""
    return {
        name: _merged_state(metric, found)
        for name, metric in metrics.items()
        if (found := [states[name] for states in by_rank if name in states])
    }


def _merged_state(metric: Any, states: list[State]) -> State:
    """Reduce the states of the ranks with an update as torchmetrics does; join their lists."""
    states = [state for state in states if _is_updated(metric, state)] or states[:1]
    if len(states) == 1:
        return states[0]
    if _SEEN in states[0]:
        states = _in_one_window(metric, states)
    reduced = {
        name: _reduced([state[name] for state in states], reduction)
        for name, reduction in metric._reductions.items()
    }
    return {**states[0], **reduced, _COUNT: sum(state[_COUNT] for state in states)}


def _reduced(values: list[Any], reduction: Any) -> Any:
    from torchmetrics.utilities import dim_zero_cat

    if isinstance(values[0], list):
        joined = [item for value in values for item in value]
        return joined if reduction in (None, dim_zero_cat) else reduction(joined)
    if reduction is dim_zero_cat:
        return dim_zero_cat(values)
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _in_one_window(metric: Any, states: list[State]) -> list[State]:
    """Return the states of `Running` without the updates that have left the window on the other ranks."""
    latest = max(state[_SEEN] for state in states)
    found = []
    for state in states:
        outdated = tuple(f"_{number % metric.window}" for number in range(state[_SEEN], latest))
        empty = {name: value for name, value in metric._defaults.items() if name.endswith(outdated)}
        found.append({**state, **to_device(empty, "cpu"), _SEEN: latest})
    return found


def unmergeable(metrics: Metrics, by_rank: Sequence[States]) -> list[str]:
    """Return the metric objects that a rank cannot update further after merging the other ranks' updates.

    torchmetrics puts their states side by side, for the final value only.
    """
    found = []
    for name, metric in metrics.items():
        updated = [states for states in by_rank if name in states and _is_updated(metric, states[name])]
        is_stacked = any(
            reduction is None and isinstance(metric._defaults[key], Tensor)
            for key, reduction in metric._reductions.items()
        )
        if is_stacked and len(updated) > 1:
            found.append(name)
    return found

"""The metrics that a module logs: accumulated over batches, reduced over ranks."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError, InvalidTypeError, LifecycleError, UnknownNameError
from rankwise.nested import to_device
from rankwise.trainer.metrics.metric_objects import (
    Metrics,
    States,
    check_is_part,
    is_metric_object,
    merged_states,
    metric_objects,
    states_of,
)

if TYPE_CHECKING:
    from rankwise.strategies import Strategy

# How two values are combined, and the value that changes no other. A mean is a sum, divided by its weight.
_REDUCTIONS: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "mean": (torch.add, 0.0),
    "sum": (torch.add, 0.0),
    "min": (torch.minimum, math.inf),
    "max": (torch.maximum, -math.inf),
}


class Reported(NamedTuple):
    """A metric's value, ready to be shown: `name` may end in `_step` or `_epoch`, `base_name` never does."""

    base_name: str
    name: str
    value: Tensor
    prog_bar: bool
    logger: bool


class _Part(NamedTuple):
    """One rank's part of a metric: a sum and its weight, or an extreme value."""

    reduce_fx: str
    total: float
    weight: float


_ABSENT = (0.0, math.nan)  # the total and the weight of a rank without a part
_RankParts = tuple[bool, Mapping[str, _Part | None]]  # whether a rank must have the names of the others


class _Options(NamedTuple):
    """How a number is reduced and shown."""

    reduce_fx: str
    on_step: bool
    on_epoch: bool
    sync_dist: bool
    prog_bar: bool
    logger: bool

    def names(self, name: str) -> set[str]:
        """Return the names under which the values are reported."""
        return {name, f"{name}_step", f"{name}_epoch"} if self.on_step and self.on_epoch else {name}


class _LoggedObject(NamedTuple):
    """A logged metric object, which is computed once for the whole epoch."""

    metric: Any
    options: _Options
    is_restored: bool = False


_OF_OBJECTS = _Options("mean", on_step=False, on_epoch=True, sync_dist=True, prog_bar=False, logger=True)


@final
@dataclass
class _Metric:
    """A logged number: its last value, and its sum or extreme value in this epoch."""

    options: _Options
    last: Tensor
    total: Tensor
    weight: float = 0.0
    last_weight: float = 0.0
    is_fresh: bool = False
    is_restored: bool = False

    def add(self, value: Tensor, weight: float) -> None:
        """Add a value. Does not wait for the device."""
        self.last, self.last_weight, self.is_fresh, self.is_restored = value, weight, True, False
        self.merge(value * weight if self.options.reduce_fx == "mean" else value, weight)

    def merge(self, total: Tensor, weight: float) -> None:
        """Add values whose sum, or extreme value, is `total`."""
        combine, _ = _REDUCTIONS[self.options.reduce_fx]
        self.total = combine(self.total.to(total.device), total)
        self.weight += weight

    def state(self) -> dict[str, Any]:
        own = replace(self, last=self.last.cpu(), total=self.total.cpu(), is_fresh=False, is_restored=True)
        return {**vars(own), "options": self.options._asdict()}

    def part(self) -> _Part:
        return _Part(self.options.reduce_fx, self.total.item(), self.weight)

    def last_part(self) -> _Part:
        weight = self.last_weight if self.options.reduce_fx == "mean" else 1.0
        return _Part(self.options.reduce_fx, self.last.item() * weight, weight)


@final
class Results:
    """The metrics of one epoch of training, or of one evaluation, of a module.

    In evaluation, values are reduced over ranks by default, and never logged by step. `suffix` is appended
    to every logged name, to distinguish several loaders.

    Attributes:
        is_open: whether values can still be logged.
        object_states: those of the metric objects before the reset, for a fit that continues the epoch.
    """

    def __init__(self, module: nn.Module, *, is_evaluation: bool) -> None:
        self.suffix = ""
        self.is_open = True
        self.object_states: States = {}
        self._module = module
        self._num_batches = 0
        self._is_evaluation = is_evaluation
        self._is_in_batch = False
        self._is_muted = False
        self._batch_size: int | None = 1
        self._synced: dict[str, str] | None = None  # how step values are reduced; None before the first step
        self._state: dict[str, dict[str, Any]] | None = None  # that a later fit continues from
        self._metrics: dict[str, _Metric] = {}
        self._objects: dict[str, _LoggedObject] = {}

    def begin_batch(self, batch_size: int | None, *, is_muted: bool = False) -> None:
        """Weight the values logged from here on by `batch_size`, None if it is not known.

        With `is_muted`, ignore them.
        """
        self._is_muted = is_muted
        self._num_batches += 1
        self._is_in_batch = True
        self._batch_size = batch_size

    def end_batch(self) -> None:
        """Weight the values logged from here on by 1."""
        self._is_muted = False
        self._is_in_batch = False
        self._batch_size = 1

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore the numbers that are logged in the block."""
        before, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = before

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Add one value; see `TrainingModule.log`."""
        if reduce_fx not in _REDUCTIONS:
            reduce_fx = _reduction_named(reduce_fx)
        if not self.is_open:
            raise _late_error(name)
        if is_metric_object(value):
            _check_object_options(name, on_step, on_epoch, reduce_fx, sync_dist)
            self._log_object(name, value, _OF_OBJECTS._replace(prog_bar=prog_bar, logger=logger))
            return
        number = _number(name, value)
        if self._is_muted:
            return
        by_step = (self._is_in_batch if on_step is None else on_step) and not self._is_evaluation
        by_epoch = (not by_step if on_epoch is None else on_epoch) or self._is_evaluation
        is_synced = self._is_evaluation if sync_dist is None else sync_dist
        options = _Options(reduce_fx, by_step, by_epoch, is_synced, prog_bar, logger)
        metric = self._metrics.get(name + self.suffix)
        if metric is None or metric.options != options:
            metric = self._with_options(name, number, options)
        metric.add(number, self._weight(name, options) if batch_size is None else batch_size)

    def _with_options(self, name: str, number: Tensor, options: _Options) -> _Metric:
        """Return a new metric, or one of a checkpoint, which a run that continues may show differently."""
        name += self.suffix
        metric = self._metrics.get(name)
        if metric is not None and metric.is_restored and metric.options.reduce_fx == options.reduce_fx:
            metric.options = options
            return metric
        self._check_names(name, options)
        empty = torch.full_like(number, _REDUCTIONS[options.reduce_fx][1])
        self._metrics[name] = metric = _Metric(options, number, empty)
        return metric

    def _log_object(self, name: str, metric: Any, options: _Options) -> None:
        logged, before = _LoggedObject(metric, options), self._objects.get(name + self.suffix)
        if before is not None and before.metric is metric and before.options == options:
            return
        if before is not None and before.is_restored:
            del self._objects[name + self.suffix]  # a run that continues may show it differently
        check_is_part(metric, name, self._module)
        self._check_names(name + self.suffix, options)
        others = {other for other, found in self._objects.items() if found.metric is metric}
        if any(not other.endswith(self.suffix) for other in others):
            raise ConfigurationError(
                message=f"log({name!r}) got the same metric object for several loaders.",
                facts="its value is computed once, over all of them.",
                remedy="make a metric object for each loader, and choose it by dataloader_idx.",
            )
        self._objects[name + self.suffix] = logged

    def _check_names(self, name: str, options: _Options) -> None:
        """Raise ConfigurationError if a name is logged in two ways, of which only one would be shown."""
        logged: Mapping[str, _Metric | _LoggedObject] = {**self._metrics, **self._objects}
        for other, found in logged.items():
            if common := options.names(name) & found.options.names(other):
                raise ConfigurationError(
                    message=f"{min(common)!r} is logged in two ways in the same epoch.",
                    facts=f"log({other!r}) has {_described(found.options)}; log({name!r}) now has "
                    f"{_described(options)}.",
                    remedy="log with the same options, or under different names.",
                )

    def _weight(self, name: str, options: _Options) -> int:
        is_weighted = options.reduce_fx == "mean" and (options.on_epoch or options.sync_dist)
        if self._batch_size is None and is_weighted:
            raise ConfigurationError(
                message=f"log({name!r}) averages over batches, but the size of this batch is not known.",
                facts="it is known for a plain DataLoader that makes batches of samples itself.",
                remedy=f'self.log("{name}", value, batch_size=number_of_samples).',
            )
        return 1 if self._batch_size is None else self._batch_size

    def stop(self) -> None:
        """Leave what is logged from here on out of the state: a later fit ends the epoch again."""
        self._state = self.state_dict()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return all that was logged so far, as plain types and CPU tensors; metric objects by name."""
        if self._state is not None:
            return self._state
        names = {id(metric): name for name, metric in metric_objects(self._module).items()}
        return {
            "numbers": {name: metric.state() for name, metric in self._metrics.items()},
            "objects": {
                name: (names[id(logged.metric)], logged.options._asdict())
                for name, logged in self._objects.items()
                if id(logged.metric) in names
            },
        }

    def add_state_dict(self, state_dict: dict[str, dict[str, Any]]) -> None:
        """Add what another instance's `state_dict` returned."""
        for name, state in state_dict["numbers"].items():
            added = _Metric(**{**state, "options": _Options(**state["options"])})
            if name in self._metrics:
                self._metrics[name].merge(added.total, added.weight)
            else:
                self._metrics[name] = added
        own = metric_objects(self._module)
        for name, (dotted_name, options) in state_dict["objects"].items():
            if dotted_name in own:
                self._objects[name] = _LoggedObject(own[dotted_name], _Options(**options), is_restored=True)

    def step_values(self, strategy: Strategy, *, is_checked: bool) -> list[Reported]:
        """Return what was logged by step since the last call; with `sync_dist=True` reduced over the ranks.

        Collective in an epoch's first step, with `is_checked`, and, if a rank had such a value in one of
        these, in all later steps. Raises when the ranks logged different names. If no rank had one, a value
        that is first logged in a later step waits for the next of these.
        """
        fresh = {
            name: logged
            for name, logged in self._metrics.items()
            if logged.is_fresh and logged.options.on_step
        }
        values = {name: logged.last for name, logged in fresh.items()}
        if strategy.world_size > 1:
            synced = {name: logged for name, logged in fresh.items() if logged.options.sync_dist}
            values = {name: value for name, value in values.items() if name not in synced}
            values.update(self._synced_steps(strategy, synced, is_checked=is_checked))
        for name in fresh.keys() & values.keys():
            fresh[name].is_fresh = False
        return self._reported(values, "_step")

    def _synced_steps(
        self, strategy: Strategy, own: dict[str, _Metric], *, is_checked: bool
    ) -> dict[str, Tensor]:
        """Reduce a step's values over the ranks; note how, the same on every rank."""
        is_checked = is_checked or self._synced is None
        if not is_checked and not self._synced:
            return {}
        parts = {name: logged.last_part() for name, logged in own.items()}
        gathered = None if is_checked else self._gathered_rows(strategy, parts)
        by_name = _by_name(gathered or strategy.all_gather_object((self._is_counted, parts)))
        noted = {name: found[0].reduce_fx for name, found in by_name.items()}
        self._synced = {**(self._synced or {}), **noted}
        return {name: _reduced(name, found) for name, found in by_name.items()}

    def _gathered_rows(self, strategy: Strategy, parts: Mapping[str, _Part]) -> list[_RankParts] | None:
        """Gather the parts of the noted names as one small tensor; return None if a rank has other names."""
        noted = self._synced or {}
        rows: list[tuple[float, float]] = [(self._is_counted, len(parts.keys() - noted.keys()))]
        rows += [parts[name][1:] if name in parts else _ABSENT for name in noted]
        by_rank = strategy.all_gather(torch.tensor(rows, dtype=torch.double)).tolist()
        if any(others for (_, others), *_ in by_rank):
            return None
        return [
            (
                is_counted > 0,
                {
                    name: _Part(reduce_fx, *row)
                    for (name, reduce_fx), row in zip(noted.items(), found, strict=True)
                    if not math.isnan(row[1])
                },
            )
            for (is_counted, _), *found in by_rank
        ]

    def epoch_values(self, strategy: Strategy, *, is_continued: bool = False) -> list[Reported]:
        """Return what was logged by epoch, reduced over the ranks with `sync_dist=True`.

        Resets metric objects; with `is_continued`, for a later fit, keeps their states. Nothing can be logged
        afterwards. Collective: every rank must call this, and raises when the ranks logged different names.
        """
        self.is_open = False
        own = {name: logged.part() for name, logged in self._metrics.items() if logged.options.on_epoch}
        synced = {name: part for name, part in own.items() if self._metrics[name].options.sync_dist}
        objects = metric_objects(self._module, [logged.metric for logged in self._objects.values()])
        states_here = to_device(states_of(objects), "cpu")
        gathered = strategy.all_gather_object(
            (self._is_counted, {**dict.fromkeys(self._objects), **synced}, states_here)
        )
        parts = {name: [part] for name, part in own.items()}
        parts.update(_by_name([(is_counted, part) for is_counted, part, _ in gathered]))
        values = {name: _reduced(name, found) for name, found in parts.items()}
        self.object_states = states_here if is_continued else {}
        states = [found for *_, found in gathered]
        if any(states):
            values.update(self._computed(strategy, objects, states))
        return self._reported(values, "_epoch")

    def _computed(self, strategy: Strategy, objects: Metrics, by_rank: list[States]) -> dict[str, Tensor]:
        """Return the values of all metric objects, on every rank those of the first that logged them."""
        with merged_states(objects, by_rank):
            own = {name: _number(name, logged.metric.compute()) for name, logged in self._objects.items()}
        for logged in self._objects.values():
            logged.metric.reset()
        values: dict[str, Tensor] = {}
        for found in strategy.all_gather_object(to_device(own, "cpu")):
            values = {**found, **values}
        return values

    @property
    def _is_counted(self) -> bool:
        """Whether this rank has to log what the others log."""
        return self._num_batches > 0 and not self._is_muted

    def _reported(self, values: Mapping[str, Tensor], ending: str) -> list[Reported]:
        reported = []
        for name, value in values.items():
            logged = self._objects.get(name) or self._metrics.get(name)
            options = _OF_OBJECTS if logged is None else logged.options
            full_name = name + ending if options.on_step and options.on_epoch else name
            reported.append(Reported(name, full_name, value, options.prog_bar, options.logger))
        return reported


def _reduction_named(given: Any) -> str:
    """Return the name of a reduction that is given as torch's or Python's function of that name."""
    name = getattr(given, "__name__", given)
    if name not in _REDUCTIONS or given not in (getattr(torch, name), getattr(builtins, name, None)):
        raise UnknownNameError(kind="reduce_fx", name=str(given), known=tuple(_REDUCTIONS))
    return str(name)


def _number(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double()
    if isinstance(value, (int, float)):
        return torch.tensor(value, dtype=torch.double)
    raise InvalidTypeError(
        argument=f"log({name!r}) value",
        value=tuple(value.shape) if isinstance(value, Tensor) else value,
        expected="a number, or a tensor with one element",
        remedy=f'self.log("{name}", value.mean())',
    )


def _by_name(gathered: Sequence[_RankParts]) -> dict[str, list[_Part]]:
    """Return the ranks' parts of each number; raise ConfigurationError if ranks have logged others."""
    _check_same_names({rank: set(parts) for rank, (is_counted, parts) in enumerate(gathered) if is_counted})
    by_name: dict[str, list[_Part]] = {}
    for _, parts in gathered:
        for name, part in parts.items():
            if part is not None:
                by_name.setdefault(name, []).append(part)
    return by_name


def _reduced(name: str, parts: list[_Part]) -> Tensor:
    """Combine the ranks' parts, in the order of the ranks."""
    if len(kinds := {part.reduce_fx for part in parts}) > 1:
        raise ConfigurationError(
            message=f"The ranks logged {name!r} with different reduce_fx: {sorted(kinds)}.",
            remedy="log it with the same options on every rank.",
        )
    combine, _ = _REDUCTIONS[parts[0].reduce_fx]
    total = reduce(combine, [torch.tensor(part.total, dtype=torch.double) for part in parts])
    return total / sum(part.weight for part in parts) if parts[0].reduce_fx == "mean" else total


def _check_same_names(logged_by: Mapping[int, set[str]]) -> None:
    everywhere = set.intersection(*logged_by.values()) if logged_by else set()
    somewhere = set().union(*logged_by.values())
    if odd := sorted(somewhere - everywhere):
        ranks = {name: ", ".join(str(rank) for rank in logged_by if name in logged_by[rank]) for name in odd}
        only = [f"{name!r} on global_rank {ranks[name]} only" for name in odd]
        raise ConfigurationError(
            message=f"The ranks logged different metrics with sync_dist=True: not all logged {odd}.",
            facts="; ".join([f"logged by all: {sorted(everywhere)}", *only]),
            remedy="log these on every rank, or with sync_dist=False.",
        )


def _described(options: _Options) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options._asdict().items())


def _late_error(name: str) -> LifecycleError:
    return LifecycleError(
        call=f"log({name!r})",
        state="metrics reported",
        needed="metrics that are not reduced yet",
        remedy="log in a step, or in a hook up to the one that ends the epoch, such as on_train_epoch_end.",
    )


def _check_object_options(
    name: str, on_step: bool | None, on_epoch: bool | None, reduce_fx: str, sync_dist: bool | None
) -> None:
    given = {"on_step": on_step, "on_epoch": on_epoch, "reduce_fx": reduce_fx, "sync_dist": sync_dist}
    if on_step or on_epoch is False or reduce_fx != "mean" or sync_dist is False:
        raise ConfigurationError(
            message=f"log({name!r}) got a metric object, which is computed once for the whole epoch, over "
            "all ranks, in its own way.",
            facts=", ".join(f"{option}={value!r}" for option, value in given.items()) + ".",
            remedy="leave these out; for each step's value: value = metric(...), then self.log(name, value).",
        )

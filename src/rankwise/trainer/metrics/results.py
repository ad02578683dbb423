"""The metrics that a module logs: accumulated over batches, reduced over ranks, shown in a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError, LifecycleError
from rankwise.nested import to_device
from rankwise.ranks import warn
from rankwise.trainer.metrics.metric_objects import (
    Metrics,
    States,
    check_is_part,
    is_metric_object,
    merged_states,
    metric_objects,
    states_of,
)
from rankwise.trainer.metrics.options import (
    ABSENT,
    REDUCTIONS,
    LoggedNumber,
    Options,
    Part,
    RankParts,
    check_object_options,
    check_over_ranks,
    number_of,
    parts_by_name,
    ranks_of_group,
    reduced_value,
    reduction_named,
)

if TYPE_CHECKING:
    from rankwise.strategies import Strategy


class Reported(NamedTuple):
    """A metric's value, ready to be shown: `name` may end in `_step` or `_epoch`, `base_name` never does."""

    base_name: str
    name: str
    value: Tensor
    prog_bar: bool
    logger: bool
    loader: int | None = None  # the only one whose batches it is of; None for all


class StepOfEvaluation(NamedTuple):
    """The values that one batch of an evaluation has logged; `batch_idx` counts the batches of its loader."""

    dataloader_idx: int
    batch_idx: int
    values: list[Reported]


class _LoggedObject(NamedTuple):
    """A logged metric object, which is computed once for the whole epoch."""

    metric: Any
    options: Options
    is_restored: bool = False


@final
class Results:
    """The metrics of one epoch of training, or of one evaluation, of a module.

    In evaluation, values are reduced over ranks by default, and each batch's values are reduced at the end.
    """

    def __init__(self, module: nn.Module, *, is_evaluation: bool, global_rank: int = 0) -> None:
        self.is_open = True  # values can still be logged
        self.object_states: States = {}  # before the reset, for a fit that continues the epoch
        self.steps: list[StepOfEvaluation] = []  # of an evaluation, once `epoch_values` has reduced them
        self.latest_steps: dict[str, Reported] = {}  # the last of each name that `step_values` has returned
        self._module = module
        self._global_rank = global_rank
        self._num_batches = 0
        self._is_evaluation = is_evaluation
        self._is_in_batch = False
        self._is_muted = False
        self._batch_size: int | None = 1
        self._suffix = ""
        self._position: tuple[int, int] | None = None  # of the last batch: its loader, its number there
        self._synced: dict[str, Options] | None = None  # how step values are reduced; None before the first
        self._state: dict[str, Any] | None = None  # that a later fit continues from
        self._metrics: dict[str, LoggedNumber] = {}
        self._objects: dict[str, _LoggedObject] = {}
        self._object_steps: dict[str, LoggedNumber] = {}  # the values that metric objects had in steps
        self._loaders: dict[str, int] = {}  # the loader whose batches have logged a name
        self._history: dict[str, list[tuple[tuple[int, int], Part]]] = {}  # of steps of an evaluation
        self._final: list[Reported] | None = None  # the values of the epoch, if no hook can log more

    def begin_loader(self, dataloader_idx: int, suffix: str) -> None:
        """Append `suffix` to the names that are logged from here on, in the batches of a loader."""
        self._suffix, self._position = suffix, (dataloader_idx, -1)

    def end_loaders(self) -> None:
        """Log under the names as they are from here on."""
        self._suffix, self._position = "", None

    def begin_batch(self, batch_size: int | None, *, is_muted: bool = False) -> None:
        """Weight the values logged from here on by `batch_size`, None for unknown.

        With `is_muted`, ignore them.
        """
        self._is_muted = is_muted
        self._num_batches += not is_muted
        if self._position is not None:
            self._position = (self._position[0], self._position[1] + 1)
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
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Add one value; see `TrainingModule.log`."""
        if not self.is_open:
            raise LifecycleError(
                call=f"log({name!r})",
                state="metrics reported",
                needed="metrics that are not reduced yet",
                remedy="log in a step, or in a hook up to the one that ends the epoch, such as "
                "on_train_epoch_end.",
            )
        if reduce_fx not in REDUCTIONS:
            reduce_fx = reduction_named(reduce_fx)
        is_object = not isinstance(value, Tensor) and is_metric_object(value)
        is_synced = is_object or (self._is_evaluation if sync_dist is None else sync_dist)
        over_ranks = (sync_dist, sync_dist_group, rank_zero_only)
        if is_object:
            check_object_options(name, reduce_fx, *over_ranks)
        else:
            check_over_ranks(name, *over_ranks, is_synced=is_synced)
        by_step, by_epoch = self._moments(value if is_object else None, on_step, on_epoch)
        options = Options(
            reduce_fx,
            by_step,
            by_epoch,
            is_synced and not rank_zero_only,
            prog_bar,
            logger is not False,
            rank_zero_only,
            None if sync_dist_group is None else ranks_of_group(name, sync_dist_group),
            self._suffix if add_dataloader_idx else "",
            sync_steps=bool(sync_dist) and not is_object,
        )
        if not (by_step or by_epoch):
            raise ConfigurationError(
                message=f"log({name!r}) would log nothing.",
                facts="on_step=False, on_epoch=False.",
                remedy="leave out one of the two.",
            )
        if is_object:
            self._log_object(name + options.suffix, value, options, is_step_asked=on_step is True)
        else:
            is_plain = isinstance(value, Tensor) and value.ndim == 0
            number = value.detach().double() if is_plain else number_of(name, value)
            self._log_number(name + options.suffix, number, options, batch_size)

    def _moments(self, metric: Any, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
        """Return whether a value is logged by step, and by epoch; `metric` is None for a number."""
        if on_step is None:
            is_only_updated = metric is not None and metric._forward_cache is None and on_epoch is None
            on_step = self._is_in_batch and not self._is_evaluation and not is_only_updated
        return on_step, (self._is_evaluation or not on_step) if on_epoch is None else on_epoch

    def _log_number(self, name: str, number: Tensor, options: Options, batch_size: int | None) -> None:
        if self._is_muted or (options.rank_zero_only and self._global_rank != 0):
            return
        metric = self._metrics.get(name)
        if metric is None or metric.options != options:
            metric = self._with_options(name, number, options)
        self._check_loader(name)
        metric.add(number, self._weight(name, options) if batch_size is None else batch_size)
        self._note_step(name, metric)

    def _note_step(self, name: str, metric: LoggedNumber) -> None:
        """Keep the value of an evaluation's batch; it may be reduced over ranks with other batches."""
        if self._is_evaluation and metric.options.on_step and self._is_in_batch and self._position:
            self._history.setdefault(name, []).append((self._position, metric.last_part()))

    def _check_loader(self, name: str) -> None:
        """Raise ConfigurationError if the batches of two loaders log under one name."""
        if self._position is None:
            return
        loader = self._position[0]
        if self._loaders.setdefault(name, loader) != loader:
            raise ConfigurationError(
                message=f"log({name!r}) got values of several loaders under one name.",
                facts=f"add_dataloader_idx=False; loaders {self._loaders[name]} and {loader}.",
                remedy="leave out add_dataloader_idx, or a name (and a metric object) for each loader.",
            )

    def _with_options(self, name: str, number: Tensor, options: Options) -> LoggedNumber:
        """Return a new metric, or one of a checkpoint, which a run that continues may show differently."""
        metric = self._metrics.get(name)
        if metric is not None and metric.is_restored and metric.options.reduce_fx == options.reduce_fx:
            metric.options = options
            return metric
        self._check_names(name, options)
        self._metrics[name] = metric = LoggedNumber.empty(number, options)
        return metric

    def _log_object(self, name: str, metric: Any, options: Options, *, is_step_asked: bool) -> None:
        before = self._objects.get(name)
        if before is None or before.metric is not metric or before.options != options:
            self._add_object(name, metric, options)
        self._check_loader(name)
        if not options.on_step or self._is_muted:
            return
        if metric._forward_cache is None:
            if is_step_asked:
                _say_no_step_value(name, metric, options)
            return
        number = number_of(name, metric._forward_cache)
        step = self._object_steps.setdefault(name, LoggedNumber.empty(number, options))
        step.add(number, 1.0)
        self._note_step(name, step)

    def _add_object(self, name: str, metric: Any, options: Options) -> None:
        before = self._objects.get(name)
        if before is not None and before.is_restored:
            del self._objects[name]  # a run that continues may show it differently
        check_is_part(metric, name.removesuffix(options.suffix), self._module)
        self._check_names(name, options)
        others = {other for other, found in self._objects.items() if found.metric is metric}
        if any(not other.endswith(options.suffix) for other in others):
            raise ConfigurationError(
                message=f"log({name!r}) got the same metric object for several loaders.",
                facts="its value is computed once, over all of them.",
                remedy="make a metric object for each loader, and choose it by dataloader_idx.",
            )
        self._objects[name] = _LoggedObject(metric, options)

    def _check_names(self, name: str, options: Options) -> None:
        """Raise ConfigurationError if a name is logged in two ways: only one would be shown."""
        logged: Mapping[str, LoggedNumber | _LoggedObject] = {**self._metrics, **self._objects}
        for other, found in logged.items():
            if common := options.names(name) & found.options.names(other):
                raise ConfigurationError(
                    message=f"{min(common)!r} is logged in two ways in the same epoch.",
                    facts=f"log({other!r}) has {found.options}; log({name!r}) now has {options}.",
                    remedy="log with the same options, or under different names.",
                )

    def _weight(self, name: str, options: Options) -> int:
        is_weighted = options.reduce_fx == "mean" and (options.on_epoch or options.sync_steps)
        if self._batch_size is None and is_weighted:
            raise ConfigurationError(
                message=f"log({name!r}) averages over batches, but the size of this batch is not known.",
                facts="it is known for a plain DataLoader that makes batches of samples itself, if its "
                "collate function or __getitems__ leaves out none and makes no more.",
                remedy=f'self.log("{name}", value, batch_size=number_of_samples).',
            )
        return 1 if self._batch_size is None else self._batch_size

    def stop(self) -> None:
        """Exclude values logged from here on from the state: a later fit ends the epoch again."""
        self._state = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return all that was logged so far, as plain types and CPU tensors; metric objects by name."""
        if self._state is not None:
            return self._state
        names = {id(metric): name for name, metric in metric_objects(self._module).items()}
        steps = [each._replace(value=each.value.cpu()) for each in self.latest_steps.values()]
        return {
            "numbers": {name: metric.state() for name, metric in self._metrics.items()},
            "objects": {
                name: (names[id(logged.metric)], logged.options._asdict())
                for name, logged in self._objects.items()
                if id(logged.metric) in names
            },
            "steps": [each._asdict() for each in steps],
        }

    def add_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add what another instance's `state_dict` returned."""
        for name, state in state_dict["numbers"].items():
            added = LoggedNumber(**{**state, "options": Options(**state["options"])})
            if name in self._metrics:
                self._metrics[name].merge(added.total, added.weight)
            else:
                self._metrics[name] = added
        for step in state_dict.get("steps", ()):  # an earlier version saved none
            self.latest_steps.setdefault(step["name"], Reported(**step))
        own = metric_objects(self._module)
        for name, (dotted_name, options) in state_dict["objects"].items():
            if dotted_name in own:
                self._objects[name] = _LoggedObject(own[dotted_name], Options(**options), is_restored=True)

    def step_values(self, strategy: Strategy, *, is_checked: bool) -> list[Reported]:
        """Return the values logged by step since the last call; with `sync_dist=True` reduced over the ranks.

        Collective in an epoch's first step, with `is_checked`, and, if a rank had such a value in one of
        these, in all later steps. Raises when the ranks logged different names. If no rank had one, a value
        that is first logged in a later step waits for the next of these.
        """
        if self._is_evaluation:
            return []
        is_checked = (is_checked or self._synced is None) and strategy.world_size > 1
        if not (self._metrics or self._object_steps or self._synced or is_checked):
            return []
        fresh = self._fresh_steps()
        values = {name: logged.last for name, logged in fresh.items()}
        if strategy.world_size > 1:
            synced = {name: logged for name, logged in fresh.items() if logged.options.sync_steps}
            values = {name: value for name, value in values.items() if name not in synced}
            values.update(self._synced_steps(strategy, synced, is_checked=is_checked))
        for name in fresh.keys() & values.keys():
            fresh[name].is_fresh = False
        reported = self._reported(values, "_step", self._synced or {})
        self.latest_steps.update({each.name: each for each in reported})
        return reported

    def own_step_values(self, strategy: Strategy) -> list[Reported]:
        """Return what `step_values` will, without the values that it reduces over the ranks."""
        is_alone, fresh = strategy.world_size == 1, self._fresh_steps().items()
        values = {name: each.last for name, each in fresh if is_alone or not each.options.sync_steps}
        return self._reported(values, "_step", {})

    def _fresh_steps(self) -> dict[str, LoggedNumber]:
        """Return the values logged by step since the last `step_values`."""
        metrics = {**self._metrics, **self._object_steps}
        return {name: each for name, each in metrics.items() if each.is_fresh and each.options.on_step}

    def _synced_steps(
        self, strategy: Strategy, own: dict[str, LoggedNumber], *, is_checked: bool
    ) -> dict[str, Tensor]:
        """Reduce a step's values over the ranks; note how, the same on every rank."""
        if not is_checked and not self._synced:
            return {}
        parts = {name: logged.last_part() for name, logged in own.items()}
        gathered = None if is_checked else self._gathered_rows(strategy, parts)
        by_name = parts_by_name(gathered or strategy.all_gather_object((self._is_counted, parts)))
        noted = {name: next(iter(found.values())).options for name, found in by_name.items()}
        self._synced = {**(self._synced or {}), **noted}
        return self._reduced(by_name)

    def _reduced(self, by_name: Mapping[str, Mapping[int, Part]]) -> dict[str, Tensor]:
        """Return this rank's values from the parts of all ranks, or of its own group if there is one."""
        values = {}
        for name, found in by_name.items():
            own = self._metrics[name].options if name in self._metrics else None
            groups = [(own or part.options).sync_ranks for part in found.values()]
            mine = [ranks for ranks in groups if ranks is None or self._global_rank in ranks]
            if mine:
                parts = [part for rank, part in found.items() if mine[0] is None or rank in mine[0]]
                values[name] = reduced_value(name, parts)
        return values

    def _gathered_rows(self, strategy: Strategy, parts: Mapping[str, Part]) -> list[RankParts] | None:
        """Gather the parts of the noted names as one small tensor; return None if a rank has other names."""
        noted = self._synced or {}
        rows: list[tuple[float, float]] = [(self._is_counted, len(parts.keys() - noted.keys()))]
        rows += [parts[name][:2] if name in parts else ABSENT for name in noted]
        by_rank = strategy.all_gather(torch.tensor(rows, dtype=torch.double)).tolist()
        if any(others for (_, others), *_ in by_rank):
            return None
        gathered: list[RankParts] = []
        for (is_counted, _), *found in by_rank:
            named = zip(noted.items(), found, strict=True)
            own = {
                name: Part(total, weight, options)
                for (name, options), (total, weight) in named
                if not math.isnan(weight)
            }
            gathered.append((is_counted > 0, own))
        return gathered

    def values_so_far(self, strategy: Strategy, *, is_read: bool) -> list[Reported]:
        """Return what `epoch_values` would, for a hook at the end of the epoch, which may still log.

        If `is_read` is false on all ranks, there is no such hook: nothing changes until `epoch_values`, which
        then takes no further exchange. Collective: every rank must call this.
        """
        values, is_read_anywhere = self._exchanged(strategy, is_read=is_read)
        self._final = None if is_read_anywhere else values
        return values

    def epoch_values(self, strategy: Strategy, *, is_continued: bool = False) -> list[Reported]:
        """Return the values logged by epoch, reduced over the ranks with `sync_dist=True`.

        Resets metric objects; with `is_continued`, for a later fit, keeps their states. Nothing can be logged
        afterwards. Collective: every rank must call this, and raises when the ranks logged different names.
        """
        self.is_open = False
        values = self._exchanged(strategy)[0] if self._final is None else self._final
        if not is_continued:
            self.object_states = {}
        for logged in self._objects.values():
            logged.metric.reset()
        return values

    def _exchanged(self, strategy: Strategy, *, is_read: bool = False) -> tuple[list[Reported], bool]:
        """Return the values logged by epoch, and whether `is_read` is true anywhere; see `epoch_values`."""
        own = {name: logged.part() for name, logged in self._metrics.items()}
        shared = {
            name: self._with_history(name, part)
            for name, part in own.items()
            if part.options.sync_dist or part.options.rank_zero_only
        }
        synced = {name: part for name, part in shared.items() if part.options.on_epoch or part.steps}
        objects = metric_objects(self._module, [logged.metric for logged in self._objects.values()])
        self.object_states = to_device(states_of(objects), "cpu")
        gathered = strategy.all_gather_object(
            (self._is_counted, {**dict.fromkeys(self._objects), **synced}, self.object_states, is_read)
        )
        by_name = parts_by_name([(is_counted, parts) for is_counted, parts, *_ in gathered])
        known = {name: next(iter(found.values())).options for name, found in by_name.items()}
        local = {name: {self._global_rank: part} for name, part in own.items() if name not in shared}
        ended = {
            name: found
            for name, found in {**local, **by_name}.items()
            if any(part.options.on_epoch for part in found.values())
        }
        values = self._reduced(ended)
        self.steps = self._steps_of_evaluation(by_name)
        states = [found for _, _, found, _ in gathered]
        if any(states):
            values.update(self._computed(strategy, objects, states))
        return self._reported(values, "_epoch", known), any(is_read for *_, is_read in gathered)

    def _with_history(self, name: str, part: Part) -> Part:
        """Return a part with the values of the steps that are reduced over the ranks."""
        steps = self._history.get(name, []) if part.options.sync_steps else []
        return part._replace(steps=tuple((*position, *step[:2]) for position, step in steps))

    def _steps_of_evaluation(self, by_name: Mapping[str, Mapping[int, Part]]) -> list[StepOfEvaluation]:
        """Return the values of each batch: of all ranks together, or of this rank's batch of that number."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, history in self._history.items():
            for position, part in history:
                found.setdefault(position, {})[name] = reduced_value(name, [part])
        shared: dict[tuple[int, int], dict[str, dict[int, Part]]] = {}
        for name, by_rank in by_name.items():
            for rank, part in by_rank.items():
                for loader, batch_idx, total, weight in part.steps:
                    parts = shared.setdefault((loader, batch_idx), {}).setdefault(name, {})
                    parts[rank] = Part(total, weight, part.options)
        for position, of_batch in shared.items():
            found.setdefault(position, {}).update(self._reduced(of_batch))
        known = {name: next(iter(by_rank.values())).options for name, by_rank in by_name.items()}
        return [
            StepOfEvaluation(*position, self._reported(values, "_step", known))
            for position, values in sorted(found.items())
        ]

    def _computed(self, strategy: Strategy, objects: Metrics, by_rank: list[States]) -> dict[str, Tensor]:
        """Return the values of all metric objects; each value is from the first rank that logged it."""
        with merged_states(objects, by_rank):
            own = {
                name: number_of(name, logged.metric.compute())
                for name, logged in self._objects.items()
                if logged.options.on_epoch
            }
        values: dict[str, Tensor] = {}
        for found in strategy.all_gather_object(to_device(own, "cpu")):
            values = {**found, **values}
        return values

    @property
    def _is_counted(self) -> bool:
        """Whether this rank must log the same names as the others."""
        return self._num_batches > 0 and not self._is_muted

    def _reported(
        self, values: Mapping[str, Tensor], ending: str, known: Mapping[str, Options]
    ) -> list[Reported]:
        """Return values as they are shown; `known` has the options of what other ranks have logged."""
        reported = []
        for name, value in values.items():
            logged = self._objects.get(name) or self._metrics.get(name)
            options = known.get(name, Options()) if logged is None else logged.options
            full_name = options.ended(name, ending)
            loader = self._loaders.get(name)
            reported.append(Reported(name, full_name, value, options.prog_bar, options.logger, loader))
        return reported


def _say_no_step_value(name: str, metric: Any, options: Options) -> None:
    """Say that a metric object has no value of this step: an error if it is logged by step only."""
    remedy = f"call the {type(metric).__name__} with the batch, instead of its update()"
    if not options.on_epoch:
        raise ConfigurationError(
            message=f"log({name!r}) got a metric object that has no value of this step.",
            facts=f"on_step=True, on_epoch=False, and its forward was not called: {options}.",
            remedy=f"{remedy}.",
        )
    warn(f"log({name!r}, on_step=True) has no value of this step: {remedy}.")


def metrics_table(stage: str, metrics: Sequence[dict[str, float]]) -> str:
    """Return a table of what `stage` has returned: a line for each metric, a column for each loader.

    >>> print(metrics_table("test", [{"loss/dataloader_idx_0": 0.5}, {"loss/dataloader_idx_1": 0.25}]))
    Test metric | DataLoader 0 | DataLoader 1
    ------------+--------------+-------------
    loss        | 0.5          | 0.25
    """
    columns = [
        {name.removesuffix(f"/dataloader_idx_{place}"): f"{value:.10g}" for name, value in found.items()}
        for place, found in enumerate(metrics)
    ]
    names = sorted({name for column in columns for name in column})
    titles = [f"{stage.capitalize()} metric", *(f"DataLoader {place}" for place in range(len(columns)))]
    lines = [titles, *([name, *(column.get(name, "") for column in columns)] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rows = [" | ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([rows[0], "-+-".join("-" * width for width in widths), *rows[1:]])

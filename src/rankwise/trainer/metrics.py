"""The metrics that a module logs: accumulated over batches, reduced over ranks."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError

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


class _LoggedObject(NamedTuple):
    """A logged metric object, which is computed once for the whole epoch; None if only other ranks log it."""

    metric: Any = None
    prog_bar: bool = False
    logger: bool = True
    on_step: bool = False
    on_epoch: bool = True


@final
@dataclass
class _Metric:
    """A logged number: its last value, and its sum or extreme value in this epoch."""

    reduce_fx: str
    on_step: bool
    on_epoch: bool
    sync_dist: bool
    prog_bar: bool
    logger: bool
    last: Tensor
    total: Tensor
    weight: float = 0.0
    last_weight: float = 0.0
    is_fresh: bool = False

    def add(self, value: Tensor, weight: float) -> None:
        """Add a value. Does not wait for the device."""
        self.last, self.last_weight, self.is_fresh = value, weight, True
        self.merge(value * weight if self.reduce_fx == "mean" else value, weight)

    def merge(self, total: Tensor, weight: float) -> None:
        """Add values whose sum, or extreme value, is `total`."""
        combine, _ = _REDUCTIONS[self.reduce_fx]
        self.total = combine(self.total.to(total.device), total)
        self.weight += weight

    def state(self) -> dict[str, Any]:
        return vars(replace(self, last=self.last.cpu(), total=self.total.cpu(), is_fresh=False))

    def part(self) -> _Part:
        return _Part(self.reduce_fx, self.total.item(), self.weight)

    def last_part(self) -> _Part:
        weight = self.last_weight if self.reduce_fx == "mean" else 1.0
        return _Part(self.reduce_fx, self.last.item() * weight, weight)


@final
class Results:
    """The metrics of one epoch of training, or of one evaluation.

    In evaluation, values are reduced over ranks by default, and never logged by step. `suffix` is appended
    to every logged name, to distinguish several loaders.
    """

    def __init__(self, *, is_evaluation: bool) -> None:
        self.suffix = ""
        self._num_batches = 0
        self._is_evaluation = is_evaluation
        self._is_in_batch = False
        self._is_muted = False
        self._batch: Any = None
        self._batch_size: int | None = None
        self._metrics: dict[str, _Metric] = {}
        self._objects: dict[str, _LoggedObject] = {}

    def begin_batch(self, batch: Any, *, is_muted: bool = False) -> None:
        """Weight the values logged from here on by the size of `batch`; with `is_muted`, ignore them."""
        self._is_muted = is_muted
        self._num_batches += 1
        self._is_in_batch = True
        self._batch, self._batch_size = batch, None

    def end_batch(self) -> None:
        """Weight the values logged from here on by 1."""
        self._is_muted = False
        self._is_in_batch = False
        self._batch, self._batch_size = None, None

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
        if is_metric_object(value):
            _check_by_epoch(name, on_step, on_epoch)
            self._objects[name + self.suffix] = _LoggedObject(value, prog_bar, logger)
            return
        number = _number(name, value)
        if self._is_muted:
            return
        metric = self._metrics.get(name + self.suffix)
        if metric is None:
            by_step = (self._is_in_batch if on_step is None else on_step) and not self._is_evaluation
            by_epoch = (not by_step if on_epoch is None else on_epoch) or self._is_evaluation
            is_synced = self._is_evaluation if sync_dist is None else sync_dist
            empty = torch.full_like(number, _REDUCTIONS[reduce_fx][1])
            metric = _Metric(reduce_fx, by_step, by_epoch, is_synced, prog_bar, logger, number, empty)
            self._metrics[name + self.suffix] = metric
        metric.add(number, self._weight() if batch_size is None else batch_size)

    def _weight(self) -> int:
        if self._batch_size is None:
            self._batch_size = 1 if self._batch is None else batch_size_of(self._batch)
        return self._batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return all that was logged so far, as plain types and CPU tensors."""
        return {name: metric.state() for name, metric in self._metrics.items()}

    def add_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add what another instance's `state_dict` returned."""
        for name, state in state_dict.items():
            added = _Metric(**state)
            if name in self._metrics:
                self._metrics[name].merge(added.total, added.weight)
            else:
                self._metrics[name] = added

    def step_values(self, strategy: Strategy, *, is_synced: bool) -> list[Reported]:
        """Return what was logged by step since the last call.

        With `is_synced` this is Collective: values with `sync_dist=True` are reduced over the ranks.
        """
        fresh = {name: metric for name, metric in self._metrics.items() if metric.on_step and metric.is_fresh}
        values = {name: metric.last for name, metric in fresh.items()}
        if is_synced and strategy.world_size > 1:
            parts = {name: metric.last_part() for name, metric in fresh.items() if metric.sync_dist}
            values.update(self._over_ranks(strategy, parts))
        for metric in fresh.values():
            metric.is_fresh = False
        return self._reported(values, "_step")

    def epoch_values(self, strategy: Strategy) -> list[Reported]:
        """Return what was logged by epoch, reduced over the ranks with `sync_dist=True`.

        Collective: every rank must call this, and raises when the ranks logged different names.
        """
        chosen = {name: metric for name, metric in self._metrics.items() if metric.on_epoch}
        synced: dict[str, Any] = {name: logged.metric.clone().cpu() for name, logged in self._objects.items()}
        synced |= {name: metric.part() for name, metric in chosen.items() if metric.sync_dist}
        values = {name: _reduced([metric.part()]) for name, metric in chosen.items() if not metric.sync_dist}
        values.update(self._over_ranks(strategy, synced))
        for logged in self._objects.values():
            logged.metric.reset()
        return self._reported(values, "_epoch")

    def _over_ranks(self, strategy: Strategy, parts: Mapping[str, Any]) -> dict[str, Tensor]:
        """Reduce all metrics with one collective, which also compares the ranks' names."""
        gathered = strategy.all_gather_object((self._num_batches > 0 and not self._is_muted, parts))
        _check_same_names(
            {rank: set(part) for rank, (has_batches, part) in enumerate(gathered) if has_batches}
        )
        names = dict.fromkeys(name for _, part in gathered for name in part)
        return {name: _combined(name, [part[name] for _, part in gathered if name in part]) for name in names}

    def _reported(self, values: Mapping[str, Tensor], ending: str) -> list[Reported]:
        reported = []
        for name, value in values.items():
            metric = self._objects.get(name) or self._metrics.get(name) or _LoggedObject()
            full_name = name + ending if metric.on_step and metric.on_epoch else name
            reported.append(Reported(name, full_name, value, metric.prog_bar, metric.logger))
        return reported


def _reduction_named(given: Any) -> str:
    """Return the name of a reduction that is given as torch's or Python's function of that name."""
    name = getattr(given, "__name__", given)
    if name not in _REDUCTIONS or given not in (getattr(torch, name), getattr(builtins, name, None)):
        raise UnknownNameError(kind="reduce_fx", name=str(given), known=tuple(_REDUCTIONS))
    return str(name)


def batch_size_of(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch; of a batch without tensors, its length."""
    tensor = _first_tensor(batch)
    if tensor is not None:
        return int(tensor.shape[0]) if tensor.ndim else 1
    return len(batch) if isinstance(batch, (list, tuple)) else 1


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return next((found for item in batch if (found := _first_tensor(item)) is not None), None)
    return None


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


def _combined(name: str, parts: list[Any]) -> Tensor:
    """Combine the ranks' parts of a number, or copies of a metric object."""
    return _reduced(parts) if isinstance(parts[0], _Part) else _number(name, computed(parts))


def _reduced(parts: list[_Part]) -> Tensor:
    """Combine the ranks' parts, in the order of the ranks."""
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


def is_metric_object(value: object) -> bool:
    """Return whether a value is a metric of torchmetrics. Does not import torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _check_by_epoch(name: str, on_step: bool | None, on_epoch: bool | None) -> None:
    if on_step or on_epoch is False:
        raise ConfigurationError(
            message=f"log({name!r}) got a metric object, which is computed once for the whole epoch.",
            facts=f"on_step={on_step}, on_epoch={on_epoch}.",
            remedy="leave both out; for each step's value: value = metric(...), then self.log(name, value).",
        )


def computed(copies: Sequence[Any]) -> Tensor:
    """Return the value of a metric over all ranks' updates, from a copy of each rank's metric.

    torchmetrics itself reduces the states, as in its own `sync`. Metrics without an update are left out.
    """
    updated = [metric for metric in copies if metric.update_count > 0] or copies[:1]
    states = [_states(metric.clone()) for metric in updated]
    merged = updated[0].clone()
    if len(updated) > 1:
        by_state = iter(zip(*states, strict=True))
        _sync(merged, lambda state, group=None: list(next(by_state)))
    value: Tensor = type(merged).compute(merged)  # not the instance's wrapper, which synchronises again
    return value


def _states(metric: Any) -> list[Tensor]:
    """Return a metric's states in the order and form in which torchmetrics exchanges them."""
    states: list[Tensor] = []

    def record(state: Tensor, group: Any = None) -> list[Tensor]:
        states.append(state)
        return [state]

    _sync(metric, record)
    return states


def _sync(metric: Any, exchange: Any) -> None:
    metric.sync(dist_sync_fn=exchange, distributed_available=lambda: True)

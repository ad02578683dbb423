"""The options of a logged value, which say how it is reduced and shown; the value; a rank's part of it."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from numbers import Real
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError

Number = Tensor | float
"""A number of double precision: a tensor of shape `()`, or Python's."""


def _extreme(choose: Callable[[Tensor, Tensor], Tensor], so_far: Number, value: Tensor) -> Tensor:
    return choose(torch.as_tensor(so_far, device=value.device), value)


# How two values are combined, and the value that changes no other. A mean is a sum, divided by its weight.
REDUCTIONS: Mapping[str, tuple[Callable[[Any, Any], Any], float]] = {
    "mean": (operator.add, 0.0),
    "sum": (operator.add, 0.0),
    "min": (partial(_extreme, torch.minimum), math.inf),
    "max": (partial(_extreme, torch.maximum), -math.inf),
}


class Options(NamedTuple):
    """How a value is reduced and shown."""

    reduce_fx: str = "mean"
    on_step: bool = False
    on_epoch: bool = True
    sync_dist: bool = True
    prog_bar: bool = False
    logger: bool = True
    rank_zero_only: bool = False  # only the value of global rank 0 counts
    sync_ranks: tuple[int, ...] | None = None  # over which it is reduced with `sync_dist`; None for all
    suffix: str = ""  # the end of its names, by which the values of several loaders are told apart
    sync_steps: bool = False  # whether the values of steps are reduced over the ranks, too

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that have a part in the value, and that must log it; None for all."""
        return (0,) if self.rank_zero_only else self.sync_ranks

    def ended(self, name: str, ending: str) -> str:
        """Return the name under which a step's (`"_step"`) or an epoch's value is reported."""
        has_both = self.on_step and self.on_epoch
        return f"{name.removesuffix(self.suffix)}{ending}{self.suffix}" if has_both else name

    def names(self, name: str) -> set[str]:
        """Return the names under which the values are reported."""
        return {name, self.ended(name, "_step"), self.ended(name, "_epoch")}

    def __str__(self) -> str:
        hidden = ("suffix", "sync_steps")  # not arguments of `log`
        return ", ".join(f"{name}={value!r}" for name, value in self._asdict().items() if name not in hidden)


class Part(NamedTuple):
    """One rank's part of a value: a sum and its weight, or an extreme value; `steps` are by batch."""

    total: float
    weight: float
    options: Options
    steps: tuple[tuple[int, int, float, float], ...] = ()  # a batch's loader, number there, total, weight


@final
@dataclass
class LoggedNumber:
    """A logged number: its last value, and its sum or extreme value in this epoch."""

    options: Options
    last: Tensor
    total: Number
    weight: float = 0.0
    last_weight: float = 0.0
    is_fresh: bool = False
    is_restored: bool = False

    @classmethod
    def empty(cls, number: Tensor, options: Options) -> Self:
        """Return one to which nothing was added."""
        return cls(options, number, REDUCTIONS[options.reduce_fx][1])

    def add(self, value: Tensor, weight: float) -> None:
        """Add a value. Does not wait for the device."""
        self.last, self.last_weight, self.is_fresh, self.is_restored = value, weight, True, False
        number: Number = value
        if value.is_cpu and self.options.reduce_fx in ("mean", "sum"):
            # Python adds the same numbers in less time than torch needs for a call.
            number, weight = value.item(), float(weight)
        self.merge(number * weight if self.options.reduce_fx == "mean" else number, weight)

    def merge(self, total: Number, weight: float) -> None:
        """Add values whose sum, or extreme value, is `total`."""
        combine, _ = REDUCTIONS[self.options.reduce_fx]
        self.total = combine(self.total, total)
        self.weight += weight

    def state(self) -> dict[str, Any]:
        total = torch.as_tensor(self.total, dtype=torch.double, device="cpu")
        own = replace(self, last=self.last.cpu(), total=total, is_restored=True)
        return {**vars(own), "options": self.options._asdict()}

    def part(self) -> Part:
        return Part(float(self.total), self.weight, self.options)

    def last_part(self) -> Part:
        weight = self.last_weight if self.options.reduce_fx == "mean" else 1.0
        return Part(self.last.item() * weight, weight, self.options)


ABSENT = (0.0, math.nan)  # the total and the weight of a rank without a part
RankParts = tuple[bool, Mapping[str, Part | None]]  # whether a rank must have the names of the others


def reduction_named(given: Any) -> str:
    """Return the name of a reduction, which may be given as torch's or Python's function of that name.

    Raises:
        UnknownNameError: for any other.
    """
    name = given.lower() if isinstance(given, str) else getattr(given, "__name__", given)
    name = "mean" if name == "avg" else name
    is_known = isinstance(name, str) and name in REDUCTIONS
    is_function = is_known and given in (getattr(torch, name), getattr(builtins, name, None))
    if not (is_known and (is_function or isinstance(given, str))):
        raise UnknownNameError(kind="reduce_fx", name=str(given), known=tuple(REDUCTIONS))
    return str(name)


def number_of(name: str, value: Any) -> Tensor:
    """Return a logged number as a tensor of shape `()`; NumPy's scalars are real numbers, too."""
    if isinstance(value, Tensor) and value.numel() == 1:
        number = value.detach().double()
        return number.reshape(()) if number.shape else number
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.double)
    raise InvalidTypeError(
        argument=f"log({name!r}) value",
        value=tuple(value.shape) if isinstance(value, Tensor) else value,
        expected="a number, or a tensor with one element",
        remedy=f'self.log("{name}", {"value.mean()" if isinstance(value, Tensor) else "number"}).',
    )


def ranks_of_group(name: str, group: Any) -> tuple[int, ...]:
    """Return the ranks of a process group; raise ConfigurationError unless this rank is one of them."""
    ranks = [] if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_process_group_ranks(group)
    if not ranks or dist.get_rank() not in ranks:
        raise ConfigurationError(
            message=f"log({name!r}) got a sync_dist_group that this rank is not part of.",
            remedy="give each rank a group that it is part of, or log on the ranks of the group only.",
        )
    return tuple(ranks)


def check_object_options(
    name: str, reduce_fx: str, sync_dist: bool | None, sync_dist_group: Any, rank_zero_only: bool
) -> None:
    """Raise ConfigurationError for options that a metric object does not have."""
    if reduce_fx != "mean" or sync_dist is False or sync_dist_group is not None or rank_zero_only:
        raise ConfigurationError(
            message=f"log({name!r}) got a metric object, which is computed over all ranks, in its own way.",
            facts=f"reduce_fx={reduce_fx!r}, sync_dist={sync_dist!r}, sync_dist_group={sync_dist_group!r}, "
            f"rank_zero_only={rank_zero_only!r}.",
            remedy="leave these out; for this rank's value: value = metric(...), then self.log(name, value).",
        )


def check_over_ranks(
    name: str, sync_dist: bool | None, sync_dist_group: Any, rank_zero_only: bool, *, is_synced: bool
) -> None:
    """Raise ConfigurationError for options that contradict each other, or have no effect."""
    has_group = sync_dist_group is not None
    if rank_zero_only and (sync_dist or has_group):
        raise ConfigurationError(
            message=f"log({name!r}) reduces over ranks, but counts global rank 0 only.",
            facts=f"rank_zero_only=True, sync_dist={sync_dist!r}.",
            remedy="leave out rank_zero_only, or sync_dist and sync_dist_group.",
        )
    if has_group and not is_synced:
        raise ConfigurationError(
            message=f"log({name!r}) has a sync_dist_group, but does not reduce over ranks.",
            remedy=f'self.log("{name}", value, sync_dist=True, sync_dist_group=group).',
        )


# -------------------------------------------------------------------------------------------- over ranks


def parts_by_name(gathered: Sequence[RankParts]) -> dict[str, dict[int, Part]]:
    """Return the parts of each number by rank; raise ConfigurationError if ranks have logged others."""
    by_name: dict[str, dict[int, Part]] = {}
    for rank, (_, parts) in enumerate(gathered):
        for name, part in parts.items():
            if part is not None:
                by_name.setdefault(name, {})[rank] = part
    logged_by = {rank: set(parts) for rank, (is_counted, parts) in enumerate(gathered) if is_counted}
    _check_same_names(logged_by, {name: _expected(found) for name, found in by_name.items()})
    return by_name


def _expected(found: Mapping[int, Part]) -> set[int] | None:
    """Return the ranks that must log a value, by the options of the ranks that have; None for all."""
    ranks = [part.options.ranks for part in found.values()]
    return None if None in ranks else {rank for some in ranks for rank in some or ()}


def _check_same_names(logged_by: Mapping[int, set[str]], expected: Mapping[str, set[int] | None]) -> None:
    missing: dict[str, list[int]] = {}
    for name in sorted(set().union(*logged_by.values())):
        ranks = expected.get(name)
        wanted = logged_by if ranks is None else [rank for rank in logged_by if rank in ranks]
        if any(name not in logged_by[rank] for rank in wanted):
            missing[name] = [rank for rank in wanted if name in logged_by[rank]]
    if missing:
        everywhere = sorted(set.intersection(*logged_by.values()))
        only = [
            f"{name!r} on global_rank {', '.join(map(str, ranks)) or 'none'} only"
            for name, ranks in missing.items()
        ]
        raise ConfigurationError(
            message=f"The ranks logged different metrics with sync_dist=True: not all logged {[*missing]}.",
            facts="; ".join([f"logged by all: {everywhere}", *only]),
            remedy="log these on every rank, or with sync_dist=False.",
        )


def reduced_value(name: str, parts: Sequence[Part]) -> Tensor:
    """Combine the ranks' parts, in the order of the ranks."""
    if len(kinds := {part.options.reduce_fx for part in parts}) > 1:
        raise ConfigurationError(
            message=f"The ranks logged {name!r} with different reduce_fx: {sorted(kinds)}.",
            remedy="log it with the same options on every rank.",
        )
    [kind] = kinds
    totals = [torch.tensor(part.total, dtype=torch.double) for part in parts]
    total = reduce(REDUCTIONS[kind][0], totals)
    return total / sum(part.weight for part in parts) if kind == "mean" else total

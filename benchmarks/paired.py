"""Compare alternatives so that other load on the machine affects all of them equally.

The alternatives (arms) run one after another within each round, in alternating order. The figure of a round
is the ratio of an arm's time to the first arm's in the same round. Printed are the median and the quartiles
of these ratios, for wall time and processor time; on a busy machine the processor time is more reliable.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from benchmarks import progress

T = TypeVar("T")
Arm = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """The median of an arm's ratios to the first arm, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], first: Sequence[float]) -> Ratio:
        """Compare two arms, round by round; `own` may have fewer rounds, the first ones."""
        ratios = [mine / other for mine, other in zip(own, first[: len(own)], strict=True)]
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        )
        return cls(middle, low, high)


@dataclass(frozen=True)
class Figure:
    """The time of an arm, and its ratio to the first arm.

    Attributes:
        wall_s: median time of a call on the slowest rank.
        processor_s: median processor time of a call, mean over the ranks.
        wall: ratio to the first arm.
        processor: the same for processor time.
        rounds: how many rounds were measured.
    """

    wall_s: float
    processor_s: float
    wall: Ratio
    processor: Ratio
    rounds: int

    @classmethod
    def of(cls, wall: Mapping[str, Sequence[float]], processor: Mapping[str, Sequence[float]]) -> Figures:
        """Return the figures of all arms, from their times in seconds, round by round."""
        first = next(iter(wall))
        return {
            name: cls(
                statistics.median(wall[name]),
                statistics.median(processor[name]),
                Ratio.of(wall[name], wall[first]),
                Ratio.of(processor[name], processor[first]),
                len(wall[name]),
            )
            for name in wall
        }


Figures = dict[str, Figure]
"""The figures of the arms of a comparison, the first arm first."""


def interleaved(
    arms: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warms_up: bool = True,
    rounds_of: Mapping[str, int] | None = None,
) -> dict[str, list[T]]:
    """Call the arms in turn, in alternating order; return what each returned in each round.

    With `warms_up` a first round is not counted. `rounds_of` names arms that take part in the first so many
    rounds only.
    """
    found: dict[str, list[T]] = {name: [] for name in arms}
    fewer = rounds_of or {}
    for number in range(0 if warms_up else 1, rounds + 1):
        taking_part = [name for name in arms if number <= fewer.get(name, rounds)]
        for name in taking_part if number % 2 else reversed(taking_part):
            progress.show(f"round {number} of {rounds}, {name}")
            result = arms[name]()
            if number:
                found[name].append(result)
    return found


def compared(arms: Mapping[str, Arm], *, rounds: int, calls: int) -> Figures:
    """Time the arms on the ranks of a job; return their figures, the same on every rank.

    Collective: every rank must call this.
    """
    spent = interleaved({name: partial(_timed, arm, calls) for name, arm in arms.items()}, rounds)
    wall = {name: _over_ranks([wall for wall, _ in times], "max") for name, times in spent.items()}
    processor = {name: _over_ranks([work for _, work in times], "mean") for name, times in spent.items()}
    return Figure.of(wall, processor)


def _timed(arm: Arm, calls: int) -> tuple[float, float]:
    from rankwise.process_group import barrier

    barrier()
    worked, begun = processor_s(), time.perf_counter()
    for _ in range(calls):
        arm()
    return (time.perf_counter() - begun) / calls, (processor_s() - worked) / calls


def processor_s() -> float:
    """Return the processor time of all threads of this process, gloo's among them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _over_ranks(times: list[float], how: str) -> list[float]:
    import torch

    from rankwise.process_group import all_reduce

    reduced: list[float] = all_reduce(torch.tensor(times, dtype=torch.float64), None, how).tolist()
    return reduced

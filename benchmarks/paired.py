"""Compare alternatives so that other load on the machine affects all of them equally.

The alternatives (arms) run one after another within each round, in alternating order. The figure of a round
is the ratio of an arm's time to the first arm's in the same round. Printed are the median and the quartiles
of these ratios, for wall time and processor time; on a busy machine the processor time is more reliable.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rankwise.process_group import all_reduce, barrier

Arm = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """The time of an arm, and its ratio to the first arm.

    Attributes:
        wall_s: median time of a call on the slowest rank.
        processor_s: median processor time of a call, mean over the ranks.
        wall: median and quartiles of the ratio to the first arm.
        processor: the same for processor time.
    """

    wall_s: float
    processor_s: float
    wall: tuple[float, float, float]
    processor: tuple[float, float, float]


def compared(arms: Mapping[str, Arm], *, rounds: int, calls: int) -> dict[str, Figure]:
    """Run the arms in turn; return their figures, the same on every rank.

    Collective: every rank must call this.
    """
    names = list(arms)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            figures = _timed(arms[name], calls)
            if number:  # the first round warms up
                spent[name].append(figures)
    wall = {name: _over_ranks([w for w, _ in spent[name]], "max") for name in names}
    processor = {name: _over_ranks([p for _, p in spent[name]], "mean") for name in names}
    first = names[0]
    return {
        name: Figure(
            statistics.median(wall[name]),
            statistics.median(processor[name]),
            _ratio(wall[name], wall[first]),
            _ratio(processor[name], processor[first]),
        )
        for name in names
    }


def _timed(arm: Arm, calls: int) -> tuple[float, float]:
    barrier()
    worked, begun = _processor_s(), time.perf_counter()
    for _ in range(calls):
        arm()
    return (time.perf_counter() - begun) / calls, (_processor_s() - worked) / calls


def _processor_s() -> float:
    """Return the processor time of all threads of this process, gloo's among them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _over_ranks(times: list[float], how: str) -> list[float]:
    reduced: list[float] = all_reduce(torch.tensor(times, dtype=torch.float64), None, how).tolist()
    return reduced


def _ratio(mine: list[float], measure: list[float]) -> tuple[float, float, float]:
    ratios = [own / other for own, other in zip(mine, measure, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def shown(figures: Mapping[str, Figure]) -> None:
    """Print a line for each arm."""
    for name, figure in figures.items():
        wall, low, high = figure.wall
        work, least, most = figure.processor
        print(
            f"    {name:30} clock {figure.wall_s * 1e3:9.3f} ms {wall:6.3f} ({low:.2f} to {high:.2f})"
            f"   processor {figure.processor_s * 1e3:9.3f} ms {work:6.3f} ({least:.2f} to {most:.2f})"
        )

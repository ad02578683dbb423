"""Print how long `gather_all_tensors` takes here and in Lightning, where that is installed.

Both run in one job, in turn, on the same tensors, so that what else the machine does falls on both alike: in
each round every rank waits for the others, then times a number of calls of one, then of the other. What is
printed is the median over the rounds, of the slowest rank in each, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from rankwise import DDPForkStrategy
from rankwise.process_group import all_reduce, barrier, gather_all_tensors

CASES: dict[str, tuple[Callable[[int], torch.Tensor], int]] = {
    "3 floats": (lambda rank: torch.ones(3), 100),
    "uneven, 3 to 6 floats": (lambda rank: torch.ones(3 + rank), 100),
    "2 x 3 to 8 x 3 floats": (lambda rank: torch.ones(2 + 2 * rank, 3), 100),
    "a million floats": (lambda rank: torch.ones(1_000_000), 5),
    "uneven, about a million floats": (lambda rank: torch.ones(1_000_000 - 1000 * rank), 5),
}


def lightning_gather() -> Callable[[torch.Tensor], Any] | None:
    """Return Lightning's function, from whichever package has it; None where none has."""
    for package in ("lightning.fabric", "lightning_fabric"):
        try:
            module = __import__(f"{package}.utilities.distributed", fromlist=["distributed"])
        except ImportError:
            continue
        function: Callable[[torch.Tensor], Any] = module._gather_all_tensors
        return function
    return None


def median_s(rounds: list[float]) -> float:
    """Return the median over the rounds, of the slowest rank in each."""
    slowest: list[float] = all_reduce(torch.tensor(rounds, dtype=torch.float64), None, "max").tolist()
    return statistics.median(slowest)


def timed(function: Callable[[torch.Tensor], Any], tensor: torch.Tensor, calls: int) -> float:
    """Return the seconds that a call takes, once every rank is here."""
    barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        function(tensor)
    return (time.perf_counter() - begun) / calls


def compare(strategy: Any, rounds: int) -> list[tuple[str, float, float | None]]:
    """Return, for each case, the seconds that a call takes here and there."""
    warnings.simplefilter("ignore")
    other, lines = lightning_gather(), []
    for name, (make, calls) in CASES.items():
        tensor = make(strategy.global_rank)
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(rounds + 1):
            times = [timed(gather_all_tensors, tensor, calls)]
            times += [timed(other, tensor, calls)] if other else []
            if number > 0:  # the first one warms up
                mine.append(times[0])
                theirs += times[1:]
        lines.append((name, median_s(mine), median_s(theirs) if theirs else None))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    if lightning_gather() is None:
        print("Lightning is not installed: only rankwise's times.")
    for ranks in options.ranks:
        print(f"{ranks} ranks")
        for name, mine, theirs in DDPForkStrategy(accelerator="cpu", devices=ranks).launch(
            compare, options.rounds
        ):
            beside = "" if theirs is None else f"   Lightning {theirs * 1e6:9.0f} us   {theirs / mine:5.2f} x"
            print(f"  {name:32} rankwise {mine * 1e6:9.0f} us{beside}")


if __name__ == "__main__":
    main()

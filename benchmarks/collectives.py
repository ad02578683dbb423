"""The time of `gather_all_tensors`, beside Lightning's and torch's `all_gather_object`, in one job."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.paired import Arm, Figures, compared
from benchmarks.programs import run_ranks
from benchmarks.results import Result, Row, rows_of_figures
from benchmarks.sampling import Sampling
from rankwise import DDPForkStrategy
from rankwise.process_group import gather_all_tensors

CASES: dict[str, tuple[Callable[[int], torch.Tensor], int]] = {
    "3 floats": (lambda rank: torch.ones(3), 100),
    "uneven, 3 to 6 floats": (lambda rank: torch.ones(3 + rank), 100),
    "2 x 3 to 8 x 3 floats": (lambda rank: torch.ones(2 + 2 * rank, 3), 100),
    "a million floats": (lambda rank: torch.ones(1_000_000), 5),
    "uneven, about a million floats": (lambda rank: torch.ones(1_000_000 - 1000 * rank), 5),
}


_LIGHTNING = "Lightning"


def measure(sampling: Sampling) -> Result:
    """Measure all cases, on each number of ranks in one job."""
    request = {"rounds": sampling.rounds, "ranks": [2] if sampling.is_quick else [2, 4]}
    rows = [Row.of_json(row) for row in run_ranks("benchmarks.collectives", request)]
    return Result(
        "collectives", rows, [] if any(row.contender == _LIGHTNING for row in rows) else [_LIGHTNING]
    )


def torch_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Gather tensors of any shapes with torch alone."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor)
    return gathered


def lightning_gather() -> Callable[[torch.Tensor], Any] | None:
    """Return Lightning's function from the package that is installed, or None."""
    for package in ("lightning.fabric", "lightning_fabric"):
        try:
            module = __import__(f"{package}.utilities.distributed", fromlist=["distributed"])
        except ImportError:
            continue
        function: Callable[[torch.Tensor], Any] = module._gather_all_tensors
        return function
    return None


def compare(strategy: Any, rounds: int) -> dict[str, Figures]:
    """Return the time of a call of both functions, for each case."""
    warnings.simplefilter("ignore")
    other, found = lightning_gather(), {}
    for name, (make, calls) in CASES.items():
        tensor = make(strategy.global_rank)
        arms: dict[str, Arm] = {
            "raw torch": partial(torch_gather, tensor),
            "rankwise": partial(gather_all_tensors, tensor),
        }
        if other is not None:
            arms[_LIGHTNING] = partial(other, tensor)
        found[name] = compared(arms, rounds=rounds, calls=calls)
    return found


def main() -> None:
    """Run as a program: measure on each number of ranks of a request."""
    request = json.loads(sys.argv[1])
    rows: list[Row] = []
    for ranks in request["ranks"]:
        strategy = DDPForkStrategy(accelerator="cpu", devices=ranks)
        for name, figures in strategy.launch(compare, request["rounds"]).items():
            rows += rows_of_figures(f"gather {name}, {ranks} ranks", figures)
    Path(request["folder"], "result").write_text(json.dumps([row.to_json() for row in rows]))


if __name__ == "__main__":
    main()

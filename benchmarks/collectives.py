"""Print how long `gather_all_tensors` takes here and in Lightning, if that is installed.

Both run in one job, one after the other, on the same tensors; `paired.py` compares them. The ratio is
Lightning's time divided by ours.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from paired import Arm, Figure, compared, shown

from rankwise import DDPForkStrategy
from rankwise.process_group import gather_all_tensors

CASES: dict[str, tuple[Callable[[int], torch.Tensor], int]] = {
    "3 floats": (lambda rank: torch.ones(3), 100),
    "uneven, 3 to 6 floats": (lambda rank: torch.ones(3 + rank), 100),
    "2 x 3 to 8 x 3 floats": (lambda rank: torch.ones(2 + 2 * rank, 3), 100),
    "a million floats": (lambda rank: torch.ones(1_000_000), 5),
    "uneven, about a million floats": (lambda rank: torch.ones(1_000_000 - 1000 * rank), 5),
}


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


def compare(strategy: Any, rounds: int) -> dict[str, dict[str, Figure]]:
    """Return the time of a call of both functions, for each case."""
    warnings.simplefilter("ignore")
    other, found = lightning_gather(), {}
    for name, (make, calls) in CASES.items():
        tensor = make(strategy.global_rank)
        arms: dict[str, Arm] = {"rankwise": partial(gather_all_tensors, tensor)}
        if other is not None:
            arms["Lightning"] = partial(other, tensor)
        found[name] = compared(arms, rounds=rounds, calls=calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if lightning_gather() is None:
        print("Lightning is not installed: only rankwise's times.")
    for ranks in options.ranks:
        print(f"{ranks} ranks, {torch.__version__}, gloo")
        strategy = DDPForkStrategy(accelerator="cpu", devices=ranks)
        for name, figures in strategy.launch(compare, options.rounds).items():
            print(f"  {name}")
            shown(figures)


if __name__ == "__main__":
    main()

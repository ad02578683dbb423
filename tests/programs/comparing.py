"""Run a program on ranks and by hand, and compare all that both give."""

import math
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rankwise.strategies import DDPStrategy
from tests.helpers.threaded import ThreadedStrategy
from tests.process.helpers import ddp
from tests.programs import on_ranks, reference
from tests.programs.program import Job, Program
from tests.programs.ranks import Ranks

TOLERANCE = 1e-12


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Return where two values differ by more than 1e-12, relative to the larger of 1 and the value."""
    if isinstance(expected, Mapping):
        missing = [f"{place}: no {key!r} in {list(found)}" for key in expected if key not in found]
        common = [(found[key], expected[key], f"{place}.{key}") for key in expected if key in found]
        return missing + [text for each in common for text in differences(*each)]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} items instead of {len(expected)}"]
        pairs = zip(found, expected, strict=True)
        return [
            text for n, (one, other) in enumerate(pairs) for text in differences(one, other, f"{place}[{n}]")
        ]
    if isinstance(expected, Tensor):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return [f"{place}: {found.shape} {found.dtype} instead of {expected.shape} {expected.dtype}"]
        error = (found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
        largest = float(error.max()) if error.numel() else 0.0
        return [] if largest <= TOLERANCE else [f"{place}: differs by {largest:.2g}"]
    if isinstance(expected, float):
        is_close = abs(found - expected) <= TOLERANCE * max(1.0, abs(expected))
        is_close = is_close or (math.isnan(found) and math.isnan(expected))
        return [] if is_close else [f"{place}: {found!r} instead of {expected!r}"]
    return [] if found == expected else [f"{place}: {found!r} instead of {expected!r}"]


def run_on_rank(rank: int, world_size: int, program: Program, job: Job, folder: Path) -> list[dict[str, Any]]:
    """Run a job in a process that has a process group."""

    def strategy(**options: Any) -> ThreadedStrategy:
        return ThreadedStrategy(rank, world_size, **options)

    return on_ranks.run_job(program, job, folder, strategy, rank)


def check(program: Program, ranks_of: Callable[[int], Ranks], folder: Path) -> None:
    """Every rank has what one process has, after every action."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    _check(program, lambda job: ranks_of(job.world_size).run(run_on_rank, program, job, folder))


def check_forked(program: Program, folder: Path) -> None:
    """The process that calls a Trainer whose stages run in forked ranks has what one process has."""
    folder = Path(tempfile.mkdtemp(dir=folder))

    def run(job: Job) -> list[Any]:
        def strategy(**options: Any) -> DDPStrategy:
            return ddp("fork", devices=job.world_size, **options)

        outcomes = on_ranks.run_job(program, job, folder, strategy)
        for outcome in outcomes:  # the module's attributes stay on the ranks
            for name in ("seen", "validations", "notes", "draws"):
                outcome.pop(name, None)
        return [outcomes]

    _check(program, run)


def check_written(program: Program, folder: Path) -> None:
    """Each rank of `script.py` has written to `folder` what one process has."""
    written = [folder / f"rank{rank}.pkl" for rank in range(2)]
    by_job = iter(list(zip(*[pickle.loads(path.read_bytes()) for path in written], strict=True)))
    _check(program, lambda job: list(next(by_job)))


def _check(program: Program, run: Callable[[Job], list[Any]]) -> None:
    saved = None
    for number, job in enumerate(program.jobs):
        by_rank = run(job)
        fits = [[outcome["seen"] for outcome in outcomes if "seen" in outcome] for outcomes in by_rank]
        draws = [outcome["draws"] for outcome in by_rank[0] if "draws" in outcome]
        seen = [list(fit) for fit in zip(*fits, strict=True)]
        expected, saved = reference.run_job(program, job, saved, seen, draws)
        actions = [action for run in job.runs for action in run.actions]
        for rank, outcomes in enumerate(by_rank):
            for place, (action, one, other) in enumerate(zip(actions, outcomes, expected, strict=True)):
                without = ("validations", "notes") if len(by_rank) < job.world_size else ()  # forked
                found = differences(one, {key: other[key] for key in other if key not in without})
                where = f"job {number} on {job.world_size} ranks, rank {rank}, action {place} ({action.name})"
                assert not found, f"{where}:\n  " + "\n  ".join(found[:8])

"""Run jobs in programs of their own, in turn, and read when each thing happened."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.contenders import absent
from benchmarks.job import Job
from benchmarks.paired import interleaved
from benchmarks.programs import ProgramError, running, variables, wait
from benchmarks.results import Result, Row, rows_of
from benchmarks.sampling import Sampling

MIB = 2**20
_ATTEMPTS = 3


@dataclass(frozen=True)
class Observed:
    """A job that has ended.

    Attributes:
        first_step_s: from the program's start to the end of the first step on the slowest rank.
        exit_s: from the program's start to its end.
        return_s: from the last rank's last step to the trained state in the caller, where it gets there.
        memory_mib: PSS of all processes within the last step, for jobs that hold.
    """

    first_step_s: float
    exit_s: float
    return_s: float = 0.0
    memory_mib: float = 0.0


def observe(job: Job) -> Observed:
    """Run a job in a fresh program.

    Raises:
        ProgramError: when it fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, job = Path(name), replace(job, folder=name)
        command = [sys.executable, "-m", "benchmarks.contenders", job.to_json()]
        begun = time.perf_counter()
        with running(command, folder, variables()) as program:
            memory = 0.0
            if job.holds:
                wait(program, folder, lambda: len(list(folder.glob("holding-*"))) == job.ranks)
                memory = pss_of_session(program.pid) / MIB
                (folder / "go").touch()
            wait(program, folder)
        end = time.perf_counter()
        if len(list(folder.glob("first_step-*"))) != job.ranks:
            raise ProgramError(f"not every rank of {job.ranks} has trained")
        returned = 0.0
        if list(folder.glob("returned-*")) and list(folder.glob("trained-*")):
            returned = job.moment("returned") - job.moment("trained")
        return Observed(job.moment("first_step") - begun, end - begun, returned, memory)


def pss_of_session(session: int) -> float:
    """Return the memory of a session's processes in bytes, what they share counted once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_of_session = int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session
            lines = (folder / "smaps_rollup").read_text().splitlines() if is_of_session else []
        except OSError:  # it has ended, or is another user's
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


Quantity = tuple[str, str, Callable[[Observed], float]]
"""A case's name, the unit, and what is read off a job that has ended."""


def compare(
    question: str, comparisons: Mapping[str, tuple[list[Job], list[Quantity]]], sampling: Sampling
) -> Result:
    """Run the jobs of each comparison in turn; return a case for each quantity."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for title, (jobs, quantities) in comparisons.items():
        errors: dict[str, list[str]] = {job.contender: [] for job in jobs}
        arms = {job.contender: partial(_try, job, errors[job.contender]) for job in jobs}
        fewer = sampling.rounds_of(arms)
        found = interleaved(arms, sampling.programs, warms_up=False, rounds_of=fewer)
        whole = {name: [one for one in each if one is not None] for name, each in found.items()}
        for name, each in found.items():
            if None in each:
                del whole[name]
                failed[f"{name}, {title}"] = errors[name][0]
        for case, unit, quantity in quantities:
            samples = {name: [quantity(one) for one in each] for name, each in whole.items()}
            rows += [replace(row, note=_note(errors[row.contender])) for row in rows_of(case, unit, samples)]
    return Result(question, rows, absent(), failed)


def _try(job: Job, errors: list[str]) -> Observed | None:
    """Run a job, again if it fails; add why to `errors`. Return None if it always fails."""
    for _ in range(_ATTEMPTS):
        try:
            return observe(job)
        except ProgramError as error:
            errors.append(str(error))
    return None


def _note(errors: list[str]) -> str:
    return f"runs that failed and were repeated: {len(errors)}" if errors else ""

"""The memory of a job of 2 forked ranks within a step, all its processes together (PSS)."""

from __future__ import annotations

from benchmarks.contenders import taking_part
from benchmarks.job import Job
from benchmarks.launched import Quantity, compare
from benchmarks.results import Result
from benchmarks.sampling import Sampling

_START = "ddp_fork"


def measure(sampling: Sampling) -> Result:
    """Measure all contenders that fork."""
    jobs = [Job(name, start=_START, ranks=2, holds=True) for name in taking_part(_START)]
    quantity: Quantity = ("2 ranks, fork", "MiB", lambda job: job.memory_mib)
    return compare("memory", {_START: (jobs, [quantity])}, sampling)

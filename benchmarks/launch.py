"""The time from a script's start to its first step on 2 ranks, and to its end, by start method."""

from __future__ import annotations

from benchmarks.contenders import taking_part
from benchmarks.job import Job
from benchmarks.launched import Quantity, compare
from benchmarks.results import Result
from benchmarks.sampling import Sampling

STARTS = {"ddp": "programs (ddp)", "ddp_fork": "fork (ddp_fork)", "ddp_spawn": "spawn (ddp_spawn)"}
"""By the value of `Job.start`: how it is called; raw torch does the same by hand."""


def measure(sampling: Sampling) -> Result:
    """Measure every start method."""
    comparisons = {}
    for start, title in STARTS.items():
        if sampling.is_quick and start != "ddp":
            continue  # `memory` and `state_return` fork
        quantities: list[Quantity] = [
            (f"{title}: script start to first step", "s", lambda job: job.first_step_s),
            (f"{title}: script start to exit", "s", lambda job: job.exit_s),
        ]
        comparisons[title] = [Job(name, start=start, ranks=2) for name in taking_part(start)], quantities
    return compare("launch", comparisons, sampling)

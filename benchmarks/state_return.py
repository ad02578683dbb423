"""The time from the last step of the ranks to the trained model in the process that started them."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contenders import taking_part
from benchmarks.job import Job
from benchmarks.launched import Quantity, compare
from benchmarks.results import Result
from benchmarks.sampling import Sampling


def measure(sampling: Sampling) -> Result:
    """Measure all contenders that return the state, in a few rounds; raw torch writes a file and loads it."""
    model, size = ("tiny", "a tiny model") if sampling.is_quick else ("large", "200 MB")
    comparisons = {}
    for start in ("ddp_fork",) if sampling.is_quick else ("ddp_fork", "ddp_spawn"):
        names = taking_part(start, returns_state=True)
        case: Quantity = (f"{size}, {start.removeprefix('ddp_')}", "s", lambda job: job.return_s)
        comparisons[start] = [Job(name, start=start, ranks=2, model=model) for name in names], [case]
    return compare("state_return", comparisons, replace(sampling, programs=sampling.others))

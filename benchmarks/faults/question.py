"""The time from a failure until every process is gone; the whole table is `python -m benchmarks.faults`."""

from __future__ import annotations

import tempfile

from benchmarks import progress
from benchmarks.faults.job import Job
from benchmarks.faults.observing import CONTENDERS, observe, taking_part
from benchmarks.results import Result, Row
from benchmarks.sampling import Sampling

_MOST_S = 20.0
_WHEN = "mid-step"
_FAULTS = (
    ("rank 0", "raises"),
    ("rank 0", "SIGKILL"),
    *(("rank 1", how) for how in ("raises", "exits 0", "SIGKILL", "SIGSTOP", "hangs inside a collective")),
)
_QUICK = [("rank 1", "raises")], ("rankwise ddp_spawn", "torch spawn")


def measure(sampling: Sampling) -> Result:
    """Run each failure once under each contender; one that ends nothing has the limit as its time."""
    faults, asked = _QUICK if sampling.is_quick else (_FAULTS, CONTENDERS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (rank, fault) in enumerate(faults):
            for place, name in enumerate(taking_part(asked)):
                progress.show(f"{rank} {fault}, {name}")
                seen = observe(Job(name, rank, fault, _WHEN, f"{folder}/{number}-{place}"), _MOST_S)
                if seen is not None:
                    is_gone = seen.gone_after_s is not None
                    note = seen.manner if is_gone else f"still there, {seen.manner}"
                    case = f"{rank} {fault} {_WHEN}: until all processes are gone"
                    rows.append(Row(case, name, seen.gone_after_s or _MOST_S, "s", None, 1, note))
    return Result("faults", rows, [name for name in CONTENDERS if name not in taking_part()])

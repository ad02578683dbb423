"""Where the time of a training step goes: Python calls and time by part of the program, for one contender.

`python -m benchmarks.step_parts rankwise "tiny model, 1 process"` prints a table. The number of calls does
not depend on the load of the machine. The profiler slows calls down: the times only say how parts compare.
"""

from __future__ import annotations

import cProfile
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import redirect_stderr
from pathlib import Path

from benchmarks.job import Job
from benchmarks.programs import run_ranks
from benchmarks.step import CASES, join_group, timed

_STEPS = (100, 500)  # of two runs: what both do, such as starting, is left out
_PACKAGES = ("rankwise", "torch", "lightning", "tqdm", "contextlib", "abc", "weakref")
Parts = dict[str, tuple[float, float]]
"""Python calls of a step, and its time in microseconds, by part."""


def measure(contender: str, case: str) -> Parts:
    """Return the parts of a step on the first rank."""
    ranks = CASES[case][0]
    found: dict[str, list[float]] = run_ranks(
        "benchmarks.step_parts", {"contender": contender, "case": case}, ranks
    )
    return {part: (calls, microseconds) for part, (calls, microseconds) in found.items()}


def profiled(contender: str, case: str, steps: int) -> Parts:
    """Train in this process; return calls and microseconds of the whole job by part."""
    ranks, fields, _ = CASES[case]
    profiler = cProfile.Profile(time.thread_time, builtins=False)
    profiler.runcall(timed, Job(contender, ranks=ranks, steps=steps, **fields))
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0])
    profiler.create_stats()
    for (file, _, _), (_, calls, own_s, _, _) in profiler.stats.items():
        part = found[part_of(file)]
        part[0] += calls
        part[1] += own_s * 1e6
    return {part: (calls, own) for part, (calls, own) in found.items()}


def part_of(file: str) -> str:
    """Return the part of the program that a file belongs to."""
    path = Path(file)
    parts = list(path.with_suffix("").parts)
    for package in _PACKAGES:
        if package in parts:
            inner = parts[len(parts) - parts[::-1].index(package) - 1 :]
            return "/".join(inner if package == "rankwise" else inner[:2])
    return "/".join(parts[-2:])


def show(parts: Parts) -> None:
    """Print the parts, the slowest first."""
    print(f"{'part':48} {'calls':>7} {'us':>7}")
    total = tuple(map(sum, zip(*parts.values(), strict=True)))
    for part, (calls, own) in [*sorted(parts.items(), key=lambda item: -item[1][1]), ("all", total)]:
        if calls >= 1:
            print(f"{part:48} {calls:7.1f} {own:7.1f}")


def main() -> None:
    """Print the parts of a step; or, as a rank, measure them."""
    if not sys.argv[1].startswith("{"):
        show(measure(*sys.argv[1:]))
        return
    request = json.loads(sys.argv[1])
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        join_group(request["port"])
        os.chdir(request["folder"])
        profiled(request["contender"], request["case"], 20)  # imports what is needed
        few, many = (profiled(request["contender"], request["case"], steps) for steps in _STEPS)
    number = _STEPS[1] - _STEPS[0]
    by_part = {
        part: [
            (total - before) / number for total, before in zip(of_many, few.get(part, (0, 0)), strict=True)
        ]
        for part, of_many in many.items()
    }
    if os.environ.get("RANK", "0") == "0":
        Path(request["folder"], "result").write_text(json.dumps(by_part))


if __name__ == "__main__":
    main()

"""The time of a training step: contenders take turns in the same processes, each with a job of some steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS, absent, taking_part
from benchmarks.job import Job, take_times
from benchmarks.paired import Figure, interleaved
from benchmarks.programs import ProgramError, run_ranks
from benchmarks.results import Result, Row, is_installed, rows_of_figures
from benchmarks.sampling import Sampling

Times = dict[str, list[tuple[float, float]]]
"""Wall and processor time of a step in seconds for each contender, round by round."""

# Case: ranks, and the fields of its job; the number of steps for whole measurements, and for quick ones.
CASES: dict[str, tuple[int, dict[str, Any], tuple[int, int]]] = {
    "tiny model, 1 process": (1, {"model": "tiny"}, (400, 30)),
    "tiny model, 1 process, with progress bar, CSV file and checkpoint": (
        1,
        {"model": "tiny", "has_extras": True},
        (400, 60),
    ),
    "tiny model, 2 ranks": (2, {"model": "tiny"}, (200, 30)),
    "5 million parameters, 2 ranks": (2, {"model": "medium"}, (30, 13)),
    "tiny model, a GPU": (1, {"model": "tiny", "device": "cuda"}, (400, 30)),
    "5 million parameters, a GPU": (1, {"model": "medium", "device": "cuda"}, (200, 30)),
}
_ON_GPU = ("raw torch", "rankwise", "Lightning Trainer")


def measure(sampling: Sampling, device: str = "cpu") -> Result:
    """Measure all cases of a device, those of one number of ranks in one program."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for ranks in (1, 2):
        cases = [
            case
            for case, (its_ranks, fields, _) in CASES.items()
            if its_ranks == ranks and fields.get("device", "cpu") == device
        ]
        if not cases:
            continue
        request = {"cases": cases, "rounds": sampling.rounds, "is_quick": sampling.is_quick}
        times: dict[str, Times] = {}
        try:
            times = run_ranks("benchmarks.step", request, ranks)
        except ProgramError as error:
            failed[f"{ranks} ranks"] = str(error)
        for case, found in times.items():
            wall = {name: [wall for wall, _ in each] for name, each in found.items()}
            processor = {name: [work for _, work in each] for name, each in found.items()}
            rows += rows_of_figures(case, Figure.of(wall, processor))
    return Result("step" if device == "cpu" else "gpu_step", rows, absent(), failed)


def case_arms(case: str, *, is_quick: bool) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return what each contender does in a case."""
    ranks, fields, steps = CASES[case]
    has_extras = fields.get("has_extras", False)
    if has_extras and not is_installed("tqdm"):
        return {}
    jobs = [
        Job(name, ranks=ranks, steps=steps[is_quick], **fields)
        for name in taking_part("here", has_extras=has_extras)
        if "device" not in fields or name in _ON_GPU
    ]
    return {job.contender: partial(timed, job) for job in jobs}


def timed(job: Job) -> tuple[float, float]:
    """Do a job; return wall and processor time of a step."""
    environment = dict(os.environ)
    CONTENDERS[job.contender].train(job)
    os.environ.clear()
    os.environ.update(environment)  # of which some contenders delete the ranks' variables
    return take_times()


def join_group(port: int) -> None:
    """Join the group that all contenders use, where there are several ranks."""
    import torch.distributed as dist

    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)


def main() -> None:
    """Run as a rank: measure the cases of a request."""
    request = json.loads(sys.argv[1])
    join_group(request["port"])
    with ExitStack() as quiet:
        nowhere = quiet.enter_context(Path(os.devnull).open("w"))
        quiet.enter_context(redirect_stdout(nowhere))
        quiet.enter_context(redirect_stderr(nowhere))
        found = {
            case: interleaved(arms, request["rounds"], warms_up=not request["is_quick"])
            for case in request["cases"]
            if (arms := case_arms(case, is_quick=request["is_quick"]))
        }
    if os.environ.get("RANK", "0") == "0":
        Path(request["folder"], "result").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

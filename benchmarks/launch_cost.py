"""Print how long two ranks take from launch to their first collective, and to the launch's return.

The first collective is an all-reduce, or with `--work ddp` a step of a small model in DDP, whose first use
imports `torch._dynamo`. Each line is a new process, which launches twice: the second launch reuses what the
first one started, such as a forkserver. Compared with torch.multiprocessing with the same start method, and
torchrun. torch is imported before the clock starts, except for torchrun, whose clock starts with its command.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_METHODS = ("fork", "forkserver", "spawn")
JOBS = (
    *(f"{library}:{method}" for method in START_METHODS for library in ("rankwise", "torch")),
    "rankwise:script",
    "torchrun",
)
RESULT = "launch_cost: "  # marks a job's own line in its output
FOLDER = "LAUNCH_COST_FOLDER"
WORK = "LAUNCH_COST_WORK"


@dataclass(frozen=True)
class Launch:
    """One launch, in seconds since it began: until every rank had worked, and until it returned."""

    to_first_collective: float
    to_return: float


# ------------------------------------------------------------------------------------- on the ranks


def rankwise_rank(strategy: Any) -> float:
    """Work once; return the time on the clock that all processes of a machine share."""
    import torch

    if os.environ[WORK] == "ddp":
        model = strategy.setup_module(torch.nn.Linear(4, 4))
        strategy.backward(model(torch.ones(2, 4)).sum())
    else:
        strategy.all_reduce(torch.ones(1), reduce_op="sum")
    return time.monotonic()


def work_with_torch() -> None:
    """Do the same with torch alone, in the group that there is; write the time to a file."""
    import torch
    import torch.distributed as dist

    if os.environ[WORK] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        del model  # before its group
    else:
        dist.all_reduce(torch.ones(1))
    Path(os.environ[FOLDER], str(dist.get_rank())).write_text(str(time.monotonic()))
    dist.destroy_process_group()


def torch_rank(local_rank: int, port: int, folder: str) -> None:
    """Join a group as a hand-written program does."""
    import torch.distributed as dist

    os.environ[FOLDER] = folder
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=local_rank, world_size=2)
    work_with_torch()


def torchrun_rank() -> None:
    """Join the group that torchrun prepared."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    work_with_torch()


# ------------------------------------------------------------------------------------- launchers


def launch_with_rankwise(start_method: str) -> Launch:
    """Launch by the strategy's name."""
    from rankwise import StrategyRegistry

    name = "ddp" if start_method == "script" else f"ddp_{start_method}"
    strategy = StrategyRegistry.create(name, accelerator="cpu", devices=2)
    start = time.monotonic()
    strategy.launch(rankwise_rank)
    end = time.monotonic()
    return Launch(max(strategy.results.values()) - start, end - start)


def launch_with_torch(start_method: str) -> Launch:
    """Launch with torch.multiprocessing, as a hand-written program does."""
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        start_processes(torch_rank, (_free_port(), folder), nprocs=2, start_method=start_method)
        end = time.monotonic()
        return Launch(_last_time_in(folder) - start, end - start)


def launch_with_torchrun() -> Launch:
    """Run this file under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", str(_free_port()), __file__, "--job", "torchrun-rank"]
        start = time.monotonic()
        subprocess.run(command, env={**os.environ, FOLDER: folder}, check=True, capture_output=True)
        end = time.monotonic()
        return Launch(_last_time_in(folder) - start, end - start)


def _last_time_in(folder: str) -> float:
    return max(float(path.read_text()) for path in Path(folder).iterdir())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# ------------------------------------------------------------------------------------- one job, all jobs


def run_job(job: str) -> None:
    """Launch twice in this process, and print both; re-run ranks come here too."""
    library, _, start_method = job.partition(":")
    if library == "torchrun-rank":
        torchrun_rank()
        return
    launchers: dict[str, Callable[[], Launch]] = {
        "rankwise": lambda: launch_with_rankwise(start_method),
        "torch": lambda: launch_with_torch(start_method),
        "torchrun": launch_with_torchrun,
    }
    if library != "torchrun":
        import torch.distributed  # noqa: F401 -- before the clock starts
    launches = [launchers[library]() for _ in range(2)]
    if os.environ.get("RANK", "0") == "0":
        print(RESULT + json.dumps([[launch.to_first_collective, launch.to_return] for launch in launches]))


def measure(job: str) -> list[Launch]:
    """Run a job in a fresh process; return its first and its second launch."""
    command = [sys.executable, __file__, "--job", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return [Launch(*times) for times in json.loads(line.removeprefix(RESULT))]
    raise SystemExit(f"{job} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def report(launches: dict[str, list[list[Launch]]]) -> None:
    """Print medians, and their ratio to torch.multiprocessing with the same start method."""

    def median(job: str, number: int, part: str) -> float:
        times: list[float] = [getattr(pair[number], part) for pair in launches[job]]
        return statistics.median(times)

    print(f"{'seconds from the launch':<22} {'to the first collective':^31} {'to the return':^31}")
    print(f"{'':<22} {'first':>7} {'second':>7} {'ratios':>15} {'first':>7} {'second':>7} {'ratios':>15}")
    for job in launches:
        peer = (
            job.replace("rankwise", "torch") if job.replace("rankwise", "torch") in launches else "torchrun"
        )
        line = f"{job:<22}"
        for part in ("to_first_collective", "to_return"):
            own = [median(job, number, part) for number in (0, 1)]
            ratios = [own[number] / median(peer, number, part) for number in (0, 1)]
            shown = "1" if job == peer else f"{ratios[0]:.2f} {ratios[1]:.2f}"
            line += f" {own[0]:7.3f} {own[1]:7.3f} {shown:>15}"
        print(line)
    print("\nratios: to torch.multiprocessing with the same start method; rankwise:script to torchrun")


def main() -> None:
    """Measure all jobs in turn, several times over, so that other load affects all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per line")
    parser.add_argument("--job", help="run one job in this process (used by this program itself)")
    parser.add_argument(
        "--work", choices=("all_reduce", "ddp"), default="all_reduce", help="what each rank does"
    )
    arguments = parser.parse_args()
    os.environ.setdefault(WORK, arguments.work)
    if arguments.job:
        run_job(arguments.job)
        return
    launches: dict[str, list[list[Launch]]] = {job: [] for job in JOBS}
    for _ in range(arguments.repeats):
        for job, measured in launches.items():
            measured.append(measure(job))
    report(launches)


if __name__ == "__main__":
    main()

"""The jobs that train by hand: under torchrun, or with `torch.multiprocessing.spawn`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.faults.job import Job, Trap, lonely
from benchmarks.programs import free_port


def train(rank: int, job: Job, port: int | None = None) -> None:
    """Train three steps on two ranks, saving after each; without a port, use torchrun's variables."""
    job.come("before the group", rank)
    where: dict[str, Any] = {}
    if port is not None:
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=job.only_timeout, **where)
    lonely[:] = [dist.new_group(timeout=job.timeout)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        job.come("mid-step", rank, step)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if rank == 0:
            torch.save({**model.state_dict(), "trap": Trap(job, step)}, job.checkpoint)
        else:
            job.come("while saving", rank, step)
        dist.barrier()
    job.come("at teardown", rank)
    del model
    dist.destroy_process_group()


def main() -> None:
    """Run as torchrun's rank, or as the process that starts the ranks; record the result."""
    job = Job.of_environment()
    if job.contender == "torchrun":
        train(int(os.environ["RANK"]), job)
        return
    signal.signal(signal.SIGALRM, lambda number, frame: job.happen())
    try:
        torch.multiprocessing.spawn(train, (job, free_port()), nprocs=2)
    except BaseException as error:
        Path(job.folder, "caught").write_text(type(error).__name__)
        raise


if __name__ == "__main__":
    main()

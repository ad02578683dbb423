"""The job in raw torch, as one writes it by hand."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.job import Job
from benchmarks.programs import free_port, torchrun_variables

_EVERY = 50  # steps
_STATE = "state.pt"


def train(job: Job) -> None:
    """Train here, or start the ranks: two programs, or two processes that are forked or spawned."""
    if job.start == "here":
        train_rank(job)
    elif job.start == "ddp":
        _start_programs(job)
    else:
        _start_functions(job)


def train_rank(job: Job) -> None:
    """Train on this rank; in the process group that there is, or in the one of torchrun's variables."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    joins = job.ranks > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("gloo")
    net = job.make_model().to(job.device)
    model: Any = torch.nn.parallel.DistributedDataParallel(net) if job.ranks > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ExitStack() as opened:
        show = _extras(job, opened) if job.has_extras else None
        for number, (samples, labels) in enumerate(job.batches()):
            job.begin_step()
            loss = cross_entropy(model(samples.to(job.device)), labels.to(job.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if show is not None:
                show(number, loss)
    job.mark("trained")
    if job.has_extras or (job.start in ("ddp_fork", "ddp_spawn") and os.environ["RANK"] == "0"):
        torch.save(net.state_dict(), Path(job.folder or ".", _STATE))
    del model  # before its group
    if joins:
        dist.destroy_process_group()


def _extras(job: Job, opened: ExitStack) -> Callable[[int, Any], None]:
    from tqdm import tqdm

    bar = opened.enter_context(tqdm(total=job.steps))
    path = Path(job.folder or ".", "metrics.csv")
    file = opened.enter_context(path.open("w"))
    lines = csv.writer(file)

    def show(number: int, loss: Any) -> None:
        bar.update(1)
        if number % _EVERY == _EVERY - 1:
            bar.set_postfix(loss=loss.item(), refresh=False)
            lines.writerow([number, loss.item()])

    return show


def _start_programs(job: Job) -> None:
    port = free_port()
    command = [*sys.orig_argv[:-1], replace(job, start="here").to_json()]
    programs = [
        subprocess.Popen(command, env={**os.environ, **torchrun_variables(rank, job.ranks, port)})
        for rank in range(job.ranks)
    ]
    if any(program.wait() for program in programs):
        sys.exit(1)


def _start_functions(job: Job) -> None:
    import torch
    from torch.multiprocessing.spawn import start_processes

    net = job.make_model()
    method = job.start.removeprefix("ddp_")
    start_processes(_rank, (job, free_port()), nprocs=job.ranks, start_method=method)
    net.load_state_dict(torch.load(Path(job.folder, _STATE), weights_only=True))
    job.mark("returned")


def _rank(rank: int, job: Job, port: int) -> None:
    os.environ.update(torchrun_variables(rank, job.ranks, port))
    train_rank(job)

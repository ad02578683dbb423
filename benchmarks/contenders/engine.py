"""The job with an engine of Ignite."""

from __future__ import annotations

import logging
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from torch.nn.functional import cross_entropy

from benchmarks.job import Job

logging.disable(logging.INFO)


def train(job: Job) -> None:
    """Train here, or on ranks that it forks or spawns."""
    if job.start == "here":
        _loop(0, job)
        return
    method = job.start.removeprefix("ddp_")
    with idist.Parallel("gloo", nproc_per_node=job.ranks, start_method=method) as parallel:
        parallel.run(_loop, job)


def _loop(_: int, job: Job) -> None:
    model: Any = job.make_model()
    if job.ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(_: Any, batch: Any) -> None:
        job.begin_step()
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    Engine(update).run(job.batches(), max_epochs=1)

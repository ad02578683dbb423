"""The job with Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator, debug_launcher
from torch.nn.functional import cross_entropy

from benchmarks.job import Job


def train(job: Job) -> None:
    """Train here, or on ranks that its launcher forks."""
    if job.start == "ddp_fork":
        debug_launcher(_loop, (job,), num_processes=job.ranks)
    else:
        _loop(job)


def _loop(job: Job) -> None:
    accelerator = Accelerator(cpu=True)
    net = job.make_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for samples, labels in job.batches():
        job.begin_step()
        loss = cross_entropy(model(samples), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

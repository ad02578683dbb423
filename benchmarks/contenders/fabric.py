"""The job with Lightning's Fabric."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

from benchmarks.job import Job


def train(job: Job) -> None:
    """Train here, or on ranks that Fabric starts."""
    strategy = job.start if job.start != "here" else "ddp" if job.ranks > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=job.ranks, strategy=strategy)
    if job.start in ("ddp_fork", "ddp_spawn"):
        fabric.launch(_loop, job)
        return
    fabric.launch()
    _loop(fabric, job)


def _loop(fabric: Any, job: Job) -> None:
    net = job.make_model()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for samples, labels in job.batches():
        job.begin_step()
        loss = cross_entropy(model(samples), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()

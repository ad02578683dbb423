"""The job in raw torch, started by torchrunx."""

from __future__ import annotations

from dataclasses import replace

import torchrunx

from benchmarks.contenders.raw import train_rank
from benchmarks.job import Job


def train(job: Job) -> None:
    """Start the ranks."""
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=job.ranks, backend="gloo")
    launcher.run(train_rank, replace(job, start="here"))

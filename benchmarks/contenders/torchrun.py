"""The job in raw torch, started by torchrun."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from benchmarks.job import Job
from benchmarks.programs import free_port


def train(job: Job) -> None:
    """Start torchrun, as on a command line."""
    rank = replace(job, contender="raw torch", start="here")
    options = ["--nproc-per-node", str(job.ranks), "--master-port", str(free_port())]
    program = ["-m", "torch.distributed.run", *options, "-m", "benchmarks.contenders", rank.to_json()]
    os.execv(sys.executable, [sys.executable, *program])  # noqa: S606  arguments of our own

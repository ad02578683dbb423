"""The time of a training step on a GPU, of raw torch and the trainers."""

from __future__ import annotations

import torch

from benchmarks import step
from benchmarks.results import Result
from benchmarks.sampling import Sampling


def measure(sampling: Sampling) -> Result:
    """Measure the cases of a GPU, where torch sees one."""
    if not torch.cuda.is_available():
        return Result("gpu_step", [], failed={"all": "torch sees no GPU"})
    return step.measure(sampling, "cuda")

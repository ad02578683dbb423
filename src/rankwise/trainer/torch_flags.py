"""Switches of torch that a Trainer may set: for a stage, and as they were after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rankwise.trainer.trainer import Trainer

__all__ = ["torch_flags_set"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def torch_flags_set(trainer: Trainer) -> Iterator[None]:
    """Have `deterministic` and `benchmark` in force in the block.

    Mutates: torch's flags and, with `deterministic`, cuBLAS's environment variable; both until the end.
    """
    with ExitStack() as stack:
        if trainer.deterministic:
            stack.enter_context(_deterministic(warn_only=trainer.deterministic == "warn"))
        if trainer.benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = trainer.benchmark
        yield


@contextmanager
def _deterministic(*, warn_only: bool) -> Iterator[None]:
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    is_workspace_ours = _CUBLAS not in os.environ
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    os.environ.setdefault(_CUBLAS, ":4096:8")  # what cuBLAS needs to be deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
        if is_workspace_ours:
            del os.environ[_CUBLAS]

"""Recognize torch's distributed optimizers without importing them, which takes a second."""

from __future__ import annotations

from torch.optim import Optimizer


def is_sharded(optimizer: Optimizer) -> bool:
    """Return whether each rank has only a part of the optimizer's state."""
    return is_distributed_optimizer(optimizer, "ZeroRedundancyOptimizer")


def is_distributed_optimizer(optimizer: Optimizer, *names: str) -> bool:
    """Return whether an optimizer is an instance of one of these classes of `torch.distributed`."""
    kinds = type(optimizer).__mro__
    return any(kind.__name__ in names and kind.__module__.startswith("torch.distributed.") for kind in kinds)

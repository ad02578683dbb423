"""Recognize and use torch's distributed optimizers without importing them, which takes a second."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim import Optimizer

from rankwise.nested import map_tensors
from rankwise.process_group.lone_calls import refuse_after_failure
from rankwise.process_group.objects import broadcast
from rankwise.torch_internals import SHARDED, check_torch

_SHARDED = "ZeroRedundancyOptimizer"
SHARDED_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"  # without it no optimizer is sharded


def is_sharded(optimizer: Optimizer) -> bool:
    """Return whether each rank has only a part of the optimizer's state."""
    return is_distributed_optimizer(optimizer, _SHARDED)


def is_distributed_optimizer(optimizer: Optimizer, *names: str) -> bool:
    """Return whether an optimizer is an instance of one of these classes of `torch.distributed`."""
    kinds = type(optimizer).__mro__
    return any(kind.__name__ in names and kind.__module__.startswith("torch.distributed.") for kind in kinds)


def consolidate(optimizer: Any) -> None:
    """Collect the whole state of a sharded optimizer on global rank 0. Collective.

    Mutates a function of torch's module meanwhile: torch's own would unpickle any data that arrives.
    """
    check_torch(SHARDED)
    call = f"collecting the state of {type(optimizer).__name__}, which is sharded,"
    refuse_after_failure(call, remedy="trainer.save_checkpoint(path, weights_only=True).")
    name = next(kind.__module__ for kind in type(optimizer).__mro__ if kind.__name__ == _SHARDED)
    module: Any = sys.modules[name]
    plain, module._broadcast_object = module._broadcast_object, _broadcast_on_cpu
    try:
        optimizer.consolidate_state_dict(to=0)
    finally:
        module._broadcast_object = plain


def _broadcast_on_cpu(value: Any, src_rank: int, group: Any = None, device: Any = None) -> Any:
    return broadcast(map_tensors(value, lambda tensor: tensor.cpu()), src_rank, group)

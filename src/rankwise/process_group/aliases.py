"""The names of PyTorch Lightning's `utilities.distributed` for `collectives` and `gathering`."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

from rankwise.errors import LifecycleError
from rankwise.process_group._members import is_distributed
from rankwise.process_group.collectives import all_reduce
from rankwise.process_group.gathering import all_gather

__all__ = ["all_gather_ddp_if_available", "sync_ddp", "sync_ddp_if_available"]

T = TypeVar("T")


def sync_ddp(
    result: T, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp.RedOpType | None = None
) -> T:
    """Reduce a tensor over the ranks, by default to its sum; see `all_reduce`.

    Collective: every rank must call this, in the same order, with the same shape and dtype. No barrier comes
    first, and the input stays as it is.

    Args:
        result: a tensor, or tensors in nested containers.
        group: the ranks to reduce over; all of them by default.
        reduce_op: a name as `all_reduce` takes it, or torch's own operation.

    Raises:
        LifecycleError: when there is no process group.
    """
    if not is_distributed():
        raise LifecycleError(
            call="sync_ddp()",
            state="no process group",
            needed="one",
            remedy="use sync_ddp_if_available(), or call it within a job.",
        )
    return all_reduce(result, group, _name(reduce_op))


def sync_ddp_if_available(
    result: T, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp.RedOpType | None = None
) -> T:
    """Do what `sync_ddp` does; without a process group return `result` itself."""
    return sync_ddp(result, group, reduce_op) if is_distributed() else result


def all_gather_ddp_if_available(
    tensor: T, group: dist.ProcessGroup | None = None, sync_grads: bool = False
) -> T:
    """Gather a tensor as `(world_size, *)`; without a process group return it itself. See `all_gather`."""
    return all_gather(tensor, group, sync_grads)


def _name(operation: str | dist.ReduceOp.RedOpType | None) -> str:
    if operation is None:
        return "sum"
    return operation if isinstance(operation, str) else str(operation).rpartition(".")[2].lower()

"""All-reduce, broadcast and barrier, which do nothing without a process group."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

from rankwise.errors import InvalidArgumentError, InvalidTypeError, UnknownNameError

__all__ = ["all_reduce", "barrier", "broadcast", "collective_device", "group_size_of", "is_distributed"]

T = TypeVar("T")

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: the sum is divided
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_MEANS = ("mean", "avg")


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def group_size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group, of which this process is one.

    Raises:
        InvalidArgumentError: when this process is not a member: torch would return without doing anything.
    """
    if dist.get_rank(group) < 0:
        raise InvalidArgumentError(
            argument="group",
            value=group,
            expected=f"a group with global_rank {dist.get_rank()} in it: only its members take part",
        )
    return dist.get_world_size(group)


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for CPU tensors in a group's collectives: with NCCL alone the current CUDA device."""
    is_cuda_only = str(dist.get_backend(group)) in ("nccl", "cuda:nccl")
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda_only else torch.device("cpu")


def all_reduce(value: T, group: dist.ProcessGroup | None = None, reduce_op: str = "mean") -> T:
    """Reduce a tensor over the ranks and return the result; the input does not change.

    Collective: every rank must call this, in the same order, with the same shape and dtype. There is no
    barrier before it.

    Args:
        value: a tensor of any shape, or tensors in nested containers; other values are returned unchanged.
        group: the ranks to reduce over; all of them by default.
        reduce_op: `"sum"`, `"mean"` (also `"avg"`), `"min"`, `"max"` or `"product"`, in any case.

    Returns:
        A tensor of the same shape and dtype, with two exceptions: the mean of integers or booleans has the
        default float dtype (and is computed from their exact sum), the sum or product of booleans int64.

    Raises:
        InvalidTypeError, UnknownNameError: for an unknown operation.
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    operation = _operation_of(reduce_op)
    if isinstance(value, torch.Tensor):  # the usual case, without walking a container
        return _reduced(value, group, operation, reduce_op)  # type: ignore[return-value]  # a tensor came in
    reduced: T = apply_to_collection(
        value, torch.Tensor, _reduced, group, operation, reduce_op, allow_frozen=True
    )
    return reduced


def _operation_of(name: str) -> dist.ReduceOp.RedOpType:
    if not isinstance(name, str):
        raise InvalidTypeError(argument="reduce_op", value=name, expected=f"one of {list(_OPERATIONS)}")
    try:
        return _OPERATIONS[name.lower()]
    except KeyError:
        raise UnknownNameError(kind="reduce_op", name=name, known=tuple(_OPERATIONS)) from None


def _reduced(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    operation: dist.ReduceOp.RedOpType,
    name: str,
) -> torch.Tensor:
    is_mean = name.lower() in _MEANS
    result = tensor.detach().to(_exact_dtype(tensor.dtype, operation, is_mean), copy=True)
    size = 1
    if is_distributed():
        size = group_size_of(group)
        sent = result.contiguous()
        if sent.device.type == "cpu":
            sent = sent.to(collective_device(group))
        dist.all_reduce(sent, op=operation, group=group)
        result = sent.to(tensor.device)
    if is_mean:
        return result / size
    return result.to(torch.bool) if _is_logical(tensor.dtype, operation) else result


def _exact_dtype(dtype: torch.dtype, operation: dist.ReduceOp.RedOpType, is_mean: bool) -> torch.dtype:
    """Return a dtype in which the reduction is exact and that every back end supports."""
    if _is_logical(dtype, operation):
        return torch.uint8
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return torch.int64 if dtype is torch.bool or (is_mean and is_integer) else dtype


def _is_logical(dtype: torch.dtype, operation: dist.ReduceOp.RedOpType) -> bool:
    return dtype is torch.bool and operation in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def broadcast(value: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return rank `src`'s value, which may be any picklable object, on every rank.

    Collective: every rank must call this, in the same order.

    Raises:
        InvalidArgumentError: when `src` is not a rank of the job.
    """
    size = dist.get_world_size() if is_distributed() else 1
    if not 0 <= src < size:
        raise InvalidArgumentError(argument="src", value=src, expected=f"a global rank from 0 to {size - 1}")
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=src, group=group)
    return values[0]


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank has called this.

    Collective: every rank must call this, in the same order.
    """
    if is_distributed():
        dist.barrier(group=group)

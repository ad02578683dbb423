"""Collectives of tensors and objects, and their aliases."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

from rankwise.errors import InvalidArgumentError, InvalidTypeError, UnknownNameError

__all__ = ["all_reduce", "barrier", "broadcast", "operation_of"]


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks a group has.

    Raises:
        InvalidArgumentError: when this process is none of them: torch would return without doing anything.
    """
    if dist.get_rank(group) < 0:
        raise InvalidArgumentError(
            argument="group",
            value=group,
            expected=f"a group with global_rank {dist.get_rank()} in it: only its members take part",
        )
    return dist.get_world_size(group)


def carrier_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device from which the group's back end can send: the CPU where it can, NCCL's otherwise."""
    backend = str(dist.get_backend(group))
    is_cuda_only = backend in ("nccl", "cuda:nccl")
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda_only else torch.device("cpu")


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


def operation_of(name: str) -> dist.ReduceOp.RedOpType:
    """Return torch's operation for a name in any case.

    Raises:
        InvalidTypeError: when it is no string.
        UnknownNameError: when there is none of that name.
    """
    if not isinstance(name, str):
        raise InvalidTypeError(argument="reduce_op", value=name, expected=f"one of {list(_OPERATIONS)}")
    try:
        return _OPERATIONS[name.lower()]
    except KeyError:
        raise UnknownNameError(kind="reduce_op", name=name, known=tuple(_OPERATIONS)) from None


def all_reduce(value: T, group: dist.ProcessGroup | None = None, reduce_op: str = "mean") -> T:
    """Reduce a tensor over the ranks; return the result, the input stays as it is.

    Collective: every rank must call this, in the same order, with the same shape and dtype. No barrier comes
    first: it would be another round trip.

    Args:
        value: a tensor of any shape, or tensors in nested containers; anything else stays as it is.
        group: the ranks to reduce over; all of them by default.
        reduce_op: `"sum"`, `"mean"` (also `"avg"`), `"min"`, `"max"` or `"product"`, in any case.

    Returns:
        A tensor of the same shape and dtype, but that the mean of integers and booleans is of the default
        float dtype (of their exact sum), and the sum or product of booleans counts in int64.

    Raises:
        InvalidTypeError, UnknownNameError: for an operation that is none.
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    operation = operation_of(reduce_op)
    if isinstance(value, torch.Tensor):  # the usual case, without the walk
        return _reduced(value, group, operation, reduce_op)  # type: ignore[return-value]  # a tensor came in
    reduced: T = apply_to_collection(
        value, torch.Tensor, _reduced, group, operation, reduce_op, allow_frozen=True
    )
    return reduced


def _reduced(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    operation: dist.ReduceOp.RedOpType,
    name: str,
) -> torch.Tensor:
    is_mean = name.lower() in _MEANS
    result = tensor.detach().to(_reduced_as(tensor.dtype, operation, is_mean), copy=True)
    size = 1
    if is_distributed():
        size = size_of(group)
        carrier = result.contiguous()
        if carrier.device.type == "cpu":
            carrier = carrier.to(carrier_of(group))
        dist.all_reduce(carrier, op=operation, group=group)
        result = carrier.to(tensor.device)
    if is_mean:
        return result / size
    return result.to(torch.bool) if _is_logical(tensor.dtype, operation) else result


def _reduced_as(dtype: torch.dtype, operation: dist.ReduceOp.RedOpType, is_mean: bool) -> torch.dtype:
    """Return the dtype in which a reduction is exact, and which every back end knows."""
    if _is_logical(dtype, operation):
        return torch.uint8
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return torch.int64 if dtype is torch.bool or (is_mean and is_integer) else dtype


def _is_logical(dtype: torch.dtype, operation: dist.ReduceOp.RedOpType) -> bool:
    return dtype is torch.bool and operation in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def broadcast(value: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return rank `src`'s value, which may be anything picklable, on every rank.

    Collective: every rank must call this, in the same order.

    Raises:
        InvalidArgumentError: when `src` is no rank of the job.
    """
    size = dist.get_world_size() if is_distributed() else 1
    if not 0 <= src < size:
        raise InvalidArgumentError(argument="src", value=src, expected=f"a global rank from 0 to {size - 1}")
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank is here.

    Collective: every rank must call this, in the same order.
    """
    if is_distributed():
        dist.barrier(group=group)

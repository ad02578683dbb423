"""Collectives that are the identity where there is no group, and take non-tensors as they are."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankwise.errors import InvalidArgumentError, UnknownNameError

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "is_distributed",
    "reduce_op",
]

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


def reduce_op(name: str) -> dist.ReduceOp.RedOpType:
    """Return torch's operation for a name in any case.

    Raises:
        UnknownNameError: when there is none of that name.
    """
    try:
        return _OPERATIONS[name.lower()]
    except KeyError:
        raise UnknownNameError(kind="reduce_op", name=name, known=tuple(_OPERATIONS)) from None


def all_reduce(value: T, group: dist.ProcessGroup | None = None, reduce_op_name: str = "mean") -> T:
    """Reduce a tensor over the ranks; return the result, the input stays as it is.

    Collective: every rank must call this, in the same order, with the same shape and dtype.

    Args:
        value: a tensor of any shape; anything else is returned as it is.
        group: the ranks to reduce over; all of them by default.
        reduce_op_name: `"sum"`, `"mean"` (also `"avg"`), `"min"`, `"max"` or `"product"`.

    Returns:
        A tensor of the same shape and dtype, but that the mean of integers is of the default float dtype.
    """
    operation = reduce_op(reduce_op_name)
    if not isinstance(value, torch.Tensor):
        return value
    is_mean = reduce_op_name.lower() in _MEANS
    result = value.detach().clone()
    if is_mean and not (result.is_floating_point() or result.is_complex()):
        result = result.to(torch.get_default_dtype())
    if is_distributed():
        dist.all_reduce(result, op=operation, group=group)
        if is_mean:
            result /= dist.get_world_size(group)
    return result  # type: ignore[return-value]  # a tensor came in, a tensor goes out


def all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
) -> torch.Tensor:
    """Gather a tensor of one shape from every rank.

    Collective: every rank must call this, in the same order, with the same shape and dtype.

    Args:
        tensor: shape `(*)`.
        group: the ranks to gather from; all of them by default.
        sync_grads: whether gradients flow back to the rank that a slice came from.

    Returns:
        Shape `(world_size, *)`; with no group the tensor itself.
    """
    if not is_distributed():
        return tensor
    if sync_grads:
        return _AllGatherGrad.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]  # torch types neither
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.detach().contiguous(), group=group)
    return torch.stack(gathered)


class _AllGatherGrad(torch.autograd.Function):
    """All-gather whose backward sums what every rank's use of a slice contributes to its origin."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = grad_outputs[0].contiguous().clone()
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=ctx.group)
        return summed[dist.get_rank(ctx.group)], None


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather any picklable value from every rank, in rank order.

    Collective: every rank must call this, in the same order.
    """
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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

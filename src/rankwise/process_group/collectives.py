"""Collectives for tensors and objects, which do nothing without a process group."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

from rankwise.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    LifecycleError,
    TensorMismatchError,
    UnknownNameError,
)

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
_ORDERED = ("min", "max")

_MAX_DIMENSIONS = 64  # torch's own limit
_FACTS = struct.Struct("<4q")  # is it a tensor, dtype, bytes, number of dimensions; the dimensions follow
_HEADER_BYTES = _FACTS.size + _MAX_DIMENSIONS * 8
_INLINE_BYTES = 4096
_FRAME_BYTES = _HEADER_BYTES + _INLINE_BYTES

# Numbers for dtypes that do not depend on the order in which a version of torch defines them.
_DTYPES = {
    zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def group_size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; raise if this process is not a member, which torch ignores."""
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
    if not isinstance(reduce_op, str):
        raise InvalidTypeError(argument="reduce_op", value=reduce_op, expected=f"one of {list(_OPERATIONS)}")
    name = reduce_op.lower()
    if name not in _OPERATIONS:
        raise UnknownNameError(kind="reduce_op", name=reduce_op, known=tuple(_OPERATIONS))
    if isinstance(value, torch.Tensor):  # the usual case, without walking a container
        return _reduced(value, group, name)  # type: ignore[return-value]  # a tensor came in
    reduced: T = apply_to_collection(value, torch.Tensor, _reduced, group, name, allow_frozen=True)
    return reduced


def _reduced(tensor: torch.Tensor, group: dist.ProcessGroup | None, name: str) -> torch.Tensor:
    result = tensor.detach().to(_exact_dtype(tensor.dtype, name), copy=True)
    size = 1
    if is_distributed():
        size = group_size_of(group)
        sent = result.contiguous()
        if sent.device.type == "cpu":
            sent = sent.to(collective_device(group))
        dist.all_reduce(sent, op=_OPERATIONS[name], group=group)
        result = sent.to(tensor.device)
    if name in _MEANS:
        return result / size
    return result.to(torch.bool) if tensor.dtype is torch.bool and name in _ORDERED else result


def _exact_dtype(dtype: torch.dtype, name: str) -> torch.dtype:
    """Return a dtype in which the reduction is exact and that every back end supports."""
    if dtype is torch.bool:
        return torch.uint8 if name in _ORDERED else torch.int64
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return torch.int64 if name in _MEANS and is_integer else dtype


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


def all_gather(tensor: T, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> T:
    """Gather a tensor of one shape from every rank.

    Collective: every rank must call this, in the same order, with the same shape and dtype. Where these may
    differ, use `gather_all_tensors`.

    Args:
        tensor: shape `(*)`; or tensors in nested containers, whose other values are returned unchanged.
        group: the ranks to gather from; all of them by default.
        sync_grads: whether gradients flow back to the rank that a slice came from: the gradient of a rank's
            slice is summed over the losses of all ranks.

    Returns:
        Shape `(world_size, *)`, on the tensor's device; without a process group the tensor itself.

    Raises:
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    if not is_distributed():
        return tensor
    if isinstance(tensor, torch.Tensor):  # the usual case, without walking a container
        return _gathered(tensor, group, sync_grads)  # type: ignore[return-value]  # a tensor came in
    gathered: T = apply_to_collection(tensor, torch.Tensor, _gathered, group, sync_grads, allow_frozen=True)
    return gathered


def all_gather_ddp_if_available(
    tensor: T, group: dist.ProcessGroup | None = None, sync_grads: bool = False
) -> T:
    """Call `all_gather`, by Lightning's name."""
    return all_gather(tensor, group, sync_grads)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None, sync_grads: bool) -> torch.Tensor:
    if sync_grads:
        return _AllGatherGrad.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]  # torch types neither
    return torch.stack(_gathered_list(tensor.detach(), group_size_of(group), group))


def _gathered_list(tensor: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    own = tensor.contiguous()
    if own.device.type == "cpu":
        own = own.to(collective_device(group))
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    return gathered if own.device == tensor.device else [part.to(tensor.device) for part in gathered]


class _AllGatherGrad(torch.autograd.Function):
    """All-gather whose backward pass sums each slice's gradients over the ranks.

    `torch.distributed.nn.functional.all_gather` costs one scatter per rank in gloo's backward pass and is
    deprecated in torch 2.13.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group, sync_grads=False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = grad_outputs[0].contiguous().clone()
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=ctx.group)
        return summed[dist.get_rank(ctx.group)], None


def gather_all_tensors(result: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Gather tensors whose sizes may differ from rank to rank, but not their number of dimensions or dtype.

    Tensors of up to 4 KiB take one collective. For larger ones it exchanges dtypes and shapes, and the
    tensors are sent after it: with gloo from rank to rank, otherwise in a second collective.

    Collective: every rank must call this, in the same order.

    Args:
        result: a dense tensor of any size.
        group: the ranks to gather from; all of them by default.

    Returns:
        Each rank's tensor, in rank order, on the device of `result`, detached.

    Raises:
        TensorMismatchError: on every rank, when numbers of dimensions or dtypes differ or one has no tensor.
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    if not is_distributed():
        return [result]
    size = group_size_of(group)
    frames = [Frame() for _ in range(size)]
    _gather_frames(frames, Frame.of(result), group)
    descriptions = [frame.description for frame in frames]
    _check_same_kind(descriptions)
    if max(description.num_bytes for description in descriptions) <= _INLINE_BYTES:
        parts = [frame.inline() for frame in frames]
        return parts if result.device.type == "cpu" else [part.to(result.device) for part in parts]
    return _gathered_large(result, descriptions, group)


def _gather_frames(frames: Sequence[Frame], own: Frame, group: dist.ProcessGroup | None) -> None:
    """Fill `frames` with the frames of all ranks."""
    targets = [frame.tensor for frame in frames]
    if collective_device(group).type == "cpu":
        dist.all_gather(targets, own.tensor, group=group)
        return
    for target, part in zip(targets, _gathered_list(own.tensor, len(frames), group), strict=True):
        target.copy_(part)


def _gathered_large(
    result: torch.Tensor, descriptions: Sequence[Description], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    own = result.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if own.device.type == "cpu" and "gloo" in str(dist.get_backend(group)):
        parts = _sent_pairwise(own, descriptions, group)
    else:
        parts = _gathered_padded(own, descriptions, group)
    return [part.view(description.shape) for part, description in zip(parts, descriptions, strict=True)]


def _sent_pairwise(
    own: torch.Tensor, descriptions: Sequence[Description], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Send flat tensors between all pairs of ranks, each in its own size; gloo's gather copies them all."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    size, own_rank = len(ranks), dist.get_rank(group)
    parts = [own.new_empty(math.prod(description.shape)) for description in descriptions]
    parts[own_rank].copy_(own)
    works: list[Any] = []
    for distance in range(1, size):
        target, source = (own_rank + distance) % size, (own_rank - distance) % size
        if own.numel():
            works.append(dist.isend(own, ranks[target], group=group))
        if parts[source].numel():
            works.append(dist.irecv(parts[source], ranks[source], group=group))
    for work in works:
        work.wait()
    return parts


def _gathered_padded(
    own: torch.Tensor, descriptions: Sequence[Description], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Gather flat tensors, padded to the size of the largest."""
    counts = [math.prod(description.shape) for description in descriptions]
    if (missing := max(counts) - own.numel()) > 0:
        own = torch.cat((own, own.new_empty(missing)))
    parts = _gathered_list(own, len(counts), group)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _check_same_kind(descriptions: Sequence[Description]) -> None:
    kinds = {(description.dtype, len(description.shape)) for description in descriptions}
    if len(kinds) > 1 or descriptions[0].dtype is None:
        raise TensorMismatchError(
            call="gather_all_tensors()", found=tuple(str(description) for description in descriptions)
        )


@final
@dataclass(frozen=True)
class Description:
    """The tensor that a rank passed to `gather_all_tensors`."""

    dtype: torch.dtype | None  # None if it passed no dense tensor
    shape: tuple[int, ...]
    num_bytes: int  # of its tensor, or of `problem`
    problem: str = ""  # what it passed instead of a dense tensor

    def __str__(self) -> str:
        return self.problem or f"{self.dtype}, shape {self.shape}"


@final
class Frame:
    """A message of fixed size that describes a rank's tensor, and contains it if it is small.

    The header is packed with `struct`: tensor operations for it took longer than sending it.
    """

    def __init__(self) -> None:
        self.memory = bytearray(_FRAME_BYTES)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)  # the same memory

    @classmethod
    def of(cls, value: object) -> Frame:
        """Return the frame that describes a value."""
        frame = cls()
        if not (isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized):
            problem = f"no tensor but {type(value).__name__}"
            if isinstance(value, torch.Tensor):
                problem = f"a tensor that is not dense (layout {value.layout}, dtype {value.dtype})"
            text = problem.encode()[:_INLINE_BYTES]
            _FACTS.pack_into(frame.memory, 0, 0, 0, len(text), 0)
            frame.memory[_HEADER_BYTES : _HEADER_BYTES + len(text)] = text
            return frame
        num_bytes = value.numel() * value.element_size()
        _FACTS.pack_into(frame.memory, 0, 1, _NUMBERS[value.dtype], num_bytes, value.ndim)
        struct.pack_into(f"<{value.ndim}q", frame.memory, _FACTS.size, *value.shape)
        if 0 < num_bytes <= _INLINE_BYTES:
            frame._inline_view(value.dtype, value.shape).copy_(value.detach())
        return frame

    @cached_property
    def description(self) -> Description:
        """The value that the frame describes."""
        is_tensor, number, num_bytes, ndim = _FACTS.unpack_from(self.memory)
        if not is_tensor:
            text = bytes(self.memory[_HEADER_BYTES : _HEADER_BYTES + num_bytes])
            return Description(None, (), num_bytes, text.decode(errors="replace"))
        shape = struct.unpack_from(f"<{ndim}q", self.memory, _FACTS.size)
        return Description(_DTYPES[number], shape, num_bytes)

    def inline(self) -> torch.Tensor:
        """Return a copy of the small tensor in the frame."""
        dtype, shape = self.description.dtype, self.description.shape
        if dtype is None or self.description.num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        return self._inline_view(dtype, shape).clone()

    def _inline_view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the memory of the small tensor, viewed with this dtype and shape."""
        count = math.prod(shape)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=_HEADER_BYTES).view(shape)


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather any picklable value from every rank, in rank order.

    Collective: every rank must call this, in the same order.

    Raises:
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * group_size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Gather any picklable value from every rank on one of them.

    Collective: every rank must call this, in the same order.

    Args:
        value: this rank's value.
        dst: the global rank that receives the values.
        group: the ranks to gather from; all of them by default.

    Returns:
        Every rank's value, in rank order, on `dst`; None on other ranks.

    Raises:
        InvalidArgumentError: when `dst` or this rank does not belong to `group`.
    """
    if not is_distributed():
        _check_member(dst, [0])
        return [value]
    size = group_size_of(group)
    _check_member(dst, dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    values: list[Any] | None = [None] * size if dist.get_rank() == dst else None
    dist.gather_object(value, values, dst=dst, group=group)
    return values


def _check_member(dst: int, workers: Sequence[int]) -> None:
    if dst not in workers:
        raise InvalidArgumentError(argument="dst", value=dst, expected=f"one of the ranks {list(workers)}")


def sync_ddp(
    result: T, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp.RedOpType | None = None
) -> T:
    """Reduce a tensor over the ranks, by default to its sum; see `all_reduce`.

    Collective: every rank must call this, in the same order, with the same shape and dtype. There is no
    barrier before it, and the input does not change.

    Args:
        result: a tensor, or tensors in nested containers.
        group: the ranks to reduce over; all of them by default.
        reduce_op: a name that `all_reduce` accepts, or torch's own operation.

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
    name = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2].lower()
    return all_reduce(result, group, "sum" if reduce_op is None else name)


def sync_ddp_if_available(
    result: T, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp.RedOpType | None = None
) -> T:
    """Call `sync_ddp` if there is a process group; otherwise return `result` itself."""
    return sync_ddp(result, group, reduce_op) if is_distributed() else result

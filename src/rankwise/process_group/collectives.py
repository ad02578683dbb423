"""Collectives for tensors, which do nothing without a process group."""

from __future__ import annotations

import datetime as dt
import enum
import math
import sys
import zlib
from collections import UserString
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from rankwise.checks import check_name
from rankwise.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    LifecycleError,
    ProcessGroupError,
    TensorMismatchError,
)
from rankwise.nested import map_nested

T = TypeVar("T")
Reduction = str | dist.ReduceOp | dist.ReduceOp.RedOpType | None  # None for the sum
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: the sum is divided
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_MEANS, _ORDERED = ("mean", "avg"), ("min", "max")
# The dtypes that gloo sends; others are sent as bytes.
_SENT = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64, torch.complex128),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)

# Values that occur beside tensors, and have nothing to reduce.
_UNCHANGED = (
    *(type(None), str, bytes, bytearray, UserString, PurePath, enum.Enum, type, torch.dtype, torch.device),
    *(dt.date, dt.time, dt.timedelta),
)
_SIGN_BIT = -(2**63)
_MAX_DIMENSIONS = 64  # torch's own limit
_HIGHEST = 2**63
# The number of the dtype, how many bytes, how many dimensions; the dimensions.
_HEADER_BYTES = (3 + 1 + _MAX_DIMENSIONS) * 8  # one more: the content is aligned to the largest dtype
_INLINE_BYTES = 4096

# Numbers for dtypes that do not depend on the order in which a version of torch defines them.
_DTYPES = {
    zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}

ALONE: Any = object()  # stands for a group of this process alone, whatever process group exists


def is_distributed(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a process group exists, and `group` is not `ALONE`: otherwise collectives do nothing."""
    return group is not ALONE and dist.is_available() and dist.is_initialized()


def has_other_ranks(group: dist.ProcessGroup | None) -> bool:
    """Whether a group has several ranks."""
    return is_distributed(group) and dist.get_world_size(group) > 1


def group_size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; raise if this process is not a member, which torch ignores."""
    if dist.get_rank(group) < 0:  # tested here: each collective passes, and most need no text
        expected = f"a group with global_rank {dist.get_rank()} in it: only its members take part"
        raise InvalidArgumentError(argument="group", value=group, expected=expected)
    return dist.get_world_size(group)


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, or [0] without one; raise if this process is not a member."""
    if not is_distributed(group):
        return [0]
    group_size_of(group)
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for CPU tensors in a group's collectives: the group's own with NCCL alone."""
    if str(dist.get_backend(group)) not in ("nccl", "cuda:nccl"):
        return torch.device("cpu")
    used: Any = dist.group.WORLD if group is None else group
    return used.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def _numeric_types() -> tuple[type, ...]:
    """Return the types of tensors, numbers and arrays; without importing NumPy."""
    numpy: Any = sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray, numpy.number, numpy.bool_)
    return (torch.Tensor, bool, int, float, complex, *arrays)


def _is_array(value: object) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def to_tensors(value: Any, device: torch.device | None = None) -> Any:
    """Return a value with its numbers and arrays as tensors on a device, by default the CPU.

    Python's numbers become int64, float64, complex128 or bool. Tensors stay on their own device. It raises
    `InvalidTypeError` for another value that may hold numbers, in nested containers too.
    """
    return map_nested(value, _numeric_types(), partial(_to_tensor, device=device), _unchanged)


def _to_tensor(value: Any, device: torch.device | None = None) -> torch.Tensor:
    if not _is_dense(value):
        raise _not_numeric(value)
    if isinstance(value, torch.Tensor):
        return value
    dtypes = {float: torch.float64, complex: torch.complex128}
    own = value.copy() if _is_array(value) else value  # torch takes no array that is read-only or reversed
    try:
        return torch.as_tensor(own, dtype=dtypes.get(type(value)), device=device or "cpu")
    except (TypeError, ValueError, RuntimeError):  # an array of objects, an integer of more than 64 bits
        raise _not_numeric(value) from None


def _is_dense(value: object) -> bool:
    """Return whether a tensor or an array, if it is one, consists of its elements alone."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_nested
        return is_plain and not value.is_quantized and not value.is_meta
    masked: Any = sys.modules.get("numpy.ma")
    return masked is None or not isinstance(value, masked.MaskedArray)


def _unchanged(value: Any) -> Any:
    if isinstance(value, _UNCHANGED):
        return value
    raise _not_numeric(value)


def _not_numeric(value: object) -> InvalidTypeError:
    expected = "a dense tensor, an array of numbers, a number of up to 64 bits, text or None, or containers"
    return InvalidTypeError(argument="value", value=value, expected=f"{expected} of these")


def _operation_name(reduce_op: Any) -> str:
    if reduce_op is None:
        return "sum"
    if isinstance(reduce_op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        operation: Any = getattr(reduce_op, "op", reduce_op)
        reduce_op = operation.name
    expected = f"one of {list(_OPERATIONS)}, or torch's ReduceOp"
    return check_name("reduce_op", reduce_op, tuple(_OPERATIONS), expected)


def all_reduce(value: T, group: dist.ProcessGroup | None = None, reduce_op: Reduction = "mean") -> T:
    """Reduce a tensor over the ranks and return the result; the input does not change.

    Collective: every rank must call this, in the same order, with the same shape and dtype. There is no
    barrier before it.

    Args:
        value: a tensor of any shape, a number or an array, or nested containers and dataclasses of these;
            text, None, paths, enumerations and dates in them are returned unchanged.
        group: the ranks to reduce over; all of them by default.
        reduce_op: `"sum"`, `"mean"` (also `"avg"`), `"min"`, `"max"` or `"product"`, in any case; or torch's
            operation. None is the sum.

    Returns:
        A tensor of the same shape and dtype, with two exceptions: the mean of integers or booleans has the
        default float dtype, their sum or product int64. 16-bit floats are reduced in 32 bits, and then
        rounded. A number for a number, and an array for an array.

    Raises:
        InvalidTypeError, UnknownNameError: for an unknown operation.
        InvalidTypeError: for other values, sparse tensors and sets among them, before anything is sent.
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    name = _operation_name(reduce_op)
    to_tensors(value)  # refuses what cannot be reduced
    reduce = partial(_reduced_like, group=group, name=name)
    reduced: T = map_nested(value, _numeric_types(), reduce, each_place=True)  # as often on every rank
    return reduced


def _reduced_like(value: Any, group: dist.ProcessGroup | None, name: str) -> Any:
    reduced = _reduced(_to_tensor(value), group, name)
    if isinstance(value, torch.Tensor):
        return reduced
    return reduced.numpy() if _is_array(value) else reduced.item()


def _reduced(tensor: torch.Tensor, group: dist.ProcessGroup | None, name: str) -> torch.Tensor:
    # In a dtype in which no part of a sum overflows, and that every back end supports.
    is_inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    inexact = torch.float32 if tensor.dtype.itemsize < torch.float32.itemsize else tensor.dtype
    result = tensor.detach().to(inexact if is_inexact else torch.int64, copy=True)
    is_shifted = tensor.dtype is torch.uint64 and name in _ORDERED  # int64 has another order
    if is_shifted:
        result ^= _SIGN_BIT
    size = 1
    if is_distributed(group):
        size = group_size_of(group)
        sent = result.contiguous()
        if sent.device.type == "cpu":
            sent = sent.to(collective_device(group))
        dist.all_reduce(sent, op=_OPERATIONS[name], group=group)
        result = sent.to(tensor.device)
    if name in _MEANS:
        result = result / size
    if is_shifted:
        result ^= _SIGN_BIT
    return result.to(tensor.dtype) if is_inexact or name in _ORDERED else result


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank has called this.

    Collective: every rank must call this, in the same order.

    Raises:
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    if is_distributed(group):
        group_size_of(group)  # which checks that this rank is a member
        dist.barrier(group=group)


def all_gather(tensor: Any, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Any:
    """Gather a tensor of one shape from every rank.

    Collective: every rank must call this, in the same order, with the same shape and dtype. Where these may
    differ, use `gather_all_tensors`.

    Args:
        tensor: shape `(*)`; a number or an array, as a tensor on the CPU; or these in nested containers and
            dataclasses. Text, None, paths, enumerations and dates in them are returned unchanged.
        group: the ranks to gather from; all of them by default.
        sync_grads: whether gradients flow back to the rank that a slice came from: the gradient of a rank's
            slice is summed over the losses of all ranks. It can be differentiated again.

    Returns:
        Shape `(world_size, *)`, on the tensor's device; without a process group the tensor itself.

    Raises:
        InvalidTypeError: for other values, sparse tensors and sets among them, before anything is sent.
        InvalidArgumentError: when this rank does not belong to `group`.
    """
    tensors = to_tensors(tensor)
    if not is_distributed(group):
        return tensors
    gather: Any = AllGatherGrad.apply if sync_grads else _gathered
    # For each place, which is as often on every rank.
    return map_nested(tensors, torch.Tensor, lambda each: gather(each, group), each_place=True)


all_gather_ddp_if_available = all_gather  # Lightning's name


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return torch.stack(_gathered_list(tensor.detach(), group_size_of(group), group))


def _gathered_list(tensor: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    own = tensor.contiguous() if tensor.dtype in _SENT else _flat(tensor).view(torch.uint8)
    if own.device.type == "cpu":
        own = own.to(collective_device(group))
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    return [part.to(tensor.device).view(tensor.dtype).view(tensor.shape) for part in gathered]


class AllGatherGrad(torch.autograd.Function):
    """All-gather whose backward pass sums each slice's gradients over the ranks; `all_gather` uses it.

    `AllGatherGrad.apply(tensor, group)` returns shape `(world_size, *)`; `group` may be left out.

    `torch.distributed.nn.functional.all_gather` costs one scatter per rank in gloo's backward pass and is
    deprecated in torch 2.13.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOfSlices.apply(grad_outputs[0], ctx.group), None  # type: ignore[no-untyped-call]  # torch's


class _SumOfSlices(torch.autograd.Function):
    """Sum over the ranks of the slices that belong to this rank: the derivative of `AllGatherGrad`."""

    @staticmethod
    def forward(ctx: Any, slices: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        is_cpu = slices.device.type == "cpu"
        summed = slices.clone(memory_format=torch.contiguous_format)
        summed = summed.to(collective_device(group)) if is_cpu else summed
        dist.all_reduce(summed, op=dist.ReduceOp.SUM, group=group)
        return summed[dist.get_rank(group)].to(slices.device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllGatherGrad.apply(grad_outputs[0], ctx.group), None  # type: ignore[no-untyped-call]  # torch's


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
    if not is_distributed(group):
        return [result]
    size = group_size_of(group)
    descriptions = [Description(each) for each in _gathered_list(describe(result), size, group)]
    kinds = {(each.dtype, len(each.shape)) for each in descriptions}
    if len(kinds) > 1 or descriptions[0].dtype is None:
        raise TensorMismatchError(call="gather_all_tensors()", found=tuple(map(str, descriptions)))
    if max(each.num_bytes for each in descriptions) <= _INLINE_BYTES:
        return [each.tensor().to(result.device) for each in descriptions]
    # Pairwise where gloo would copy all tensors, otherwise padded to the same size.
    is_pairwise = result.device.type == "cpu" and "gloo" in str(dist.get_backend(group))
    exchange = _sent_pairwise if is_pairwise else _gathered_padded
    parts = exchange(_flat(result), [each.shape.numel() for each in descriptions], group)
    return [part.view(each.shape) for part, each in zip(parts, descriptions, strict=True)]


def _sent_pairwise(
    own: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    size, own_rank = len(ranks), dist.get_rank(group)
    parts = [own.new_empty(count) for count in counts]
    parts[own_rank].copy_(own)
    works: list[Any] = []
    for distance in range(1, size):
        target, source = (own_rank + distance) % size, (own_rank - distance) % size
        if own.numel():
            works.append(dist.isend(own, ranks[target], group=group))
        if counts[source]:
            works.append(dist.irecv(parts[source], ranks[source], group=group))
    for work in works:
        work.wait()
    return parts


def _gathered_padded(
    own: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    if (missing := max(counts) - own.numel()) > 0:
        own = torch.cat((own, own.new_empty(missing)))
    parts = _gathered_list(own, len(counts), group)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def describe(value: object) -> torch.Tensor:
    """Return a message of fixed size that describes a tensor, and contains it if it is small."""
    message = torch.zeros(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8, device="cpu")
    if isinstance(value, torch.Tensor) and _is_dense(value):
        number, shape, num_bytes = _NUMBERS[value.dtype], value.shape, value.nbytes
        content = _flat(value).view(torch.uint8) if num_bytes <= _INLINE_BYTES else None
    else:
        problem = f"no tensor but {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            problem = f"a tensor that is not dense (layout {value.layout}, dtype {value.dtype})"
        content = torch.frombuffer(bytearray(problem.encode()[:_INLINE_BYTES]), dtype=torch.uint8)
        number, shape, num_bytes = 0, torch.Size(), len(content)
    header = torch.tensor((number, num_bytes, len(shape), *shape), device="cpu")
    message.view(torch.int64)[: len(header)] = header
    if content is not None:
        message[_HEADER_BYTES : _HEADER_BYTES + num_bytes] = content
    return message


def _no_message(expected: str) -> ProcessGroupError:
    return ProcessGroupError(
        f"What a rank has sent in a collective is not {expected}: it has called another collective.",
        "every rank must call the same collectives, in the same order: see check_collectives.",
    )


@final
class Description:
    """A rank's message about the tensor that it passed to `gather_all_tensors`."""

    def __init__(self, message: torch.Tensor) -> None:
        # `num_bytes` is the size of the tensor, or of the text about a value that is no dense tensor.
        number, self.num_bytes, ndim, *shape = message[:_HEADER_BYTES].view(torch.int64).tolist()
        self.dtype = _DTYPES.get(number)  # None for such a value
        shape = shape[: max(0, ndim)]
        # A rank that calls another collective may send anything.
        num_bytes = math.prod(shape) * self.dtype.itemsize if self.dtype else self.num_bytes
        is_shape = min(shape, default=0) >= 0 and math.prod(filter(None, shape)) < _HIGHEST
        if not (0 <= ndim <= _MAX_DIMENSIONS and is_shape and self.num_bytes == num_bytes >= 0):
            raise _no_message("the description of a tensor")
        self.shape = torch.Size(shape)
        self._content = message[_HEADER_BYTES : _HEADER_BYTES + self.num_bytes]

    def __str__(self) -> str:
        if self.dtype is None:
            return bytes(self._content.tolist()).decode(errors="replace")
        return f"{self.dtype}, shape {tuple(self.shape)}"

    def tensor(self) -> torch.Tensor:
        """Return a copy of the small tensor in the message."""
        return self._content.clone().view(self.dtype).view(self.shape)  # type: ignore[arg-type]  # not None here


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def broadcast_bytes(own: torch.Tensor | None, src: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the bytes that rank `src` gives; the other ranks do not know their number. Collective."""
    device = collective_device(group)
    first = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8, device="cpu")
    if own is not None:
        first[:8].view(torch.int64).fill_(own.numel())
        first[8 : 8 + own.numel()] = own[:_INLINE_BYTES]
    first = first.to(device)
    dist.broadcast(first, src=src, group=group)
    count = int(first[:8].view(torch.int64))
    if count < 0:
        raise _no_message("a number of bytes")
    if count <= _INLINE_BYTES:
        return first[8 : 8 + count]
    whole = torch.empty(count, dtype=torch.uint8, device=device) if own is None else own.to(device)
    dist.broadcast(whole, src=src, group=group)
    return whole


def gather_bytes(
    own: torch.Tensor, group: dist.ProcessGroup | None, dst: int | None = None
) -> list[torch.Tensor]:
    """Gather each rank's bytes, on `dst` only if it is given. Their number may differ between ranks."""
    if dst is None:
        return gather_all_tensors(own, group)
    descriptions = [Description(each) for each in _gathered_list(describe(own), group_size_of(group), group)]
    counts = [each.num_bytes for each in descriptions]
    if max(counts) <= _INLINE_BYTES:
        return [each.tensor() for each in descriptions]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
    padded[: own.numel()] = own
    padded = padded.to(collective_device(group))
    parts = [torch.empty_like(padded) for _ in counts] if dist.get_rank() == dst else None
    dist.gather(padded, parts, dst=dst, group=group)
    return [part[:count] for part, count in zip(parts or [], counts, strict=False)]


def sync_ddp(result: T, group: dist.ProcessGroup | None = None, reduce_op: Reduction = None) -> T:
    """Reduce a tensor over the ranks, by default to its sum; see `all_reduce`.

    Collective: every rank must call this, in the same order, with the same shape and dtype. There is no
    barrier before it, and the input does not change.

    Args:
        result: a tensor, a number or an array, or nested containers of these.
        group: the ranks to reduce over; all of them by default.
        reduce_op: as `all_reduce` accepts it.

    Raises:
        LifecycleError: when there is no process group.
    """
    if not is_distributed():
        remedy = "use sync_ddp_if_available(), or call it within a job."
        raise LifecycleError(call="sync_ddp()", state="no process group", needed="one", remedy=remedy)
    return all_reduce(result, group, reduce_op)


def sync_ddp_if_available(
    result: T, group: dist.ProcessGroup | None = None, reduce_op: Reduction = None
) -> T:
    """Call `sync_ddp` if there is a process group; otherwise return `result` itself."""
    return sync_ddp(result, group, reduce_op) if is_distributed() else result

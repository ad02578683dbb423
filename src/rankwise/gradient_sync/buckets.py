"""Average gradients over the ranks in a few large buckets, without DDP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from rankwise.errors import ConfigurationError
from rankwise.process_group.collectives import all_reduce

BUCKET_BYTES = 32 * 2**20
FULL_PRECISION = (torch.float32, torch.float64)
"""The dtypes in which weights can be summed."""


def reduce_gradients(
    parameters: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> float | None:
    """Average the gradients of `parameters` over the ranks, in place.

    A gradient that exists on some ranks only counts as zero on the others, where it is created; one that
    exists on no rank stays None. The buckets depend on the parameters alone, so they are the same on all
    ranks; one flag per parameter in the same all-reduce says which gradients exist.

    Collective: every rank must call this, with the same parameters in the same order.

    Args:
        parameters: those that require no gradient are left out.
        group: the ranks to average over; all of them by default.
        weight: this rank's weight, to average the weights too.
        bucket_bytes: the size limit of a bucket.

    Returns:
        The mean of the ranks' weights; None without `weight`.

    Raises:
        ConfigurationError: for sparse gradients.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return reduce_listed(trained, group, weight=weight, bucket_bytes=bucket_bytes)


def reduce_listed(
    parameters: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> float | None:
    """Average the gradients of all `parameters`, as `reduce_gradients`."""
    require_dense(parameters)
    buckets = list(buckets_of(parameters, bucket_bytes))
    # The weight is part of the first bucket, or sent alone if that bucket's dtype is too coarse for it.
    is_weight_inside = bool(buckets) and buckets[0][0].dtype in FULL_PRECISION
    works: list[tuple[list[Tensor], Tensor, Any]] = []
    for number, members in enumerate(buckets):
        tail = [float(parameter.grad is not None) for parameter in members]
        if weight is not None and number == 0 and is_weight_inside:
            tail.append(weight)
        first = members[0]
        sent = torch.tensor(tail, dtype=first.dtype).to(first.device, non_blocking=True)
        flat = concatenated_gradients(members, sent).mul_(1 / dist.get_world_size(group))
        works.append((members, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for members, flat, work in works:
        work.wait()
        write_means(members, flat, flat[sum(parameter.numel() for parameter in members) :].tolist())
    if weight is None:
        return None
    return float(works[0][1][-1]) if is_weight_inside else all_reduce(float(weight), group)


@final
class HookBucket:
    """The gradients of some parameters in one tensor, with the methods of torch's `GradBucket`."""

    def __init__(self, parameters: list[Tensor], index: int, is_last: bool) -> None:
        self._parameters = parameters
        self._index = index
        self._is_last = is_last
        self._buffer = concatenated_gradients(parameters)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        views = _unflatten_dense_tensors(self._buffer, self._parameters)
        return [view.view(like.shape) for view, like in zip(views, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._parameters


def reduce_with_hook(
    parameters: Sequence[Tensor], hook: Callable[[Any], Any], group: dist.ProcessGroup | None
) -> None:
    """Average gradients as `reduce_gradients` does, with a hook, which gets one `HookBucket` after the other.

    A separate all-reduce says which gradients exist, because a hook may round or drop the flags. Collective.
    """
    require_dense(parameters)
    buckets = list(buckets_of(parameters, BUCKET_BYTES))
    futures = [
        hook(HookBucket(members, index, index + 1 == len(buckets))) for index, members in enumerate(buckets)
    ]
    if not buckets:
        return
    flags = [float(member.grad is not None) for members in buckets for member in members]
    exist = torch.tensor(flags, device=buckets[0][0].device)
    dist.all_reduce(exist, group=group)
    flags_by_bucket = exist.cpu().split([len(members) for members in buckets])
    for members, future, exists in zip(buckets, futures, flags_by_bucket, strict=True):
        reduced: Any = future.wait()
        flat = reduced if isinstance(reduced, Tensor) else reduced[0]
        write_means(members, flat, exists.tolist())


def require_dense(parameters: Iterable[Tensor]) -> None:
    """Raise for sparse gradients."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigurationError(
                message='sync_mode="forced_sync" and manual optimisation cannot average sparse gradients.',
                facts=f"a parameter of shape {tuple(parameter.shape)} has one.",
                remedy='use dense gradients, or automatic optimisation with sync_mode="single_auto_sync".',
            )


def buckets_of(parameters: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield groups of parameters of one dtype and device, in an order that is the same on every rank."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        if kind in open_buckets and sizes[kind] + size > bucket_bytes:
            yield open_buckets.pop(kind)
        if kind not in open_buckets:
            open_buckets[kind], sizes[kind] = [], 0
        open_buckets[kind].append(parameter)
        sizes[kind] += size
    yield from open_buckets.values()


def concatenated_gradients(parameters: Sequence[Tensor], *tail: Tensor) -> Tensor:
    """Return a flat copy of the gradients, zeros for missing ones, followed by `tail`."""
    with torch.no_grad():
        pieces = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        pieces.extend(tail)
        flat: Tensor = _flatten_dense_tensors(pieces)
        return flat.clone() if len(pieces) == 1 else flat  # torch does not copy a single tensor


def write_means(parameters: Sequence[Tensor], flat: Tensor, exists: Sequence[float]) -> None:
    """Copy flat averaged gradients into those of `parameters` for which `exists` is not 0."""
    targets, sources = [], []
    means = _unflatten_dense_tensors(flat, parameters)
    for parameter, mean, flag in zip(parameters, means, exists, strict=False):
        if flag == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        if mean.numel():  # torch loses the shape of empty tensors
            targets.append(parameter.grad)
            sources.append(mean)
    if targets:
        torch._foreach_copy_(targets, sources)


@final
@dataclass(eq=False)
class FlatGradients:
    """The gradients of some parameters, as one tensor for each storage that only they occupy: DDP's buckets.

    With `gradient_as_bucket_view=True` an operation on all gradients takes one kernel for each bucket.
    """

    parameters: Sequence[Tensor]
    _known_gradients: list[Tensor] = field(default_factory=list, init=False)
    _pieces: list[Tensor] = field(default_factory=list, init=False)

    def pieces(self) -> list[Tensor]:
        """Return tensors that cover all gradients, each element once."""
        gradients = [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]
        known = self._known_gradients
        if len(gradients) != len(known) or not all(map(is_, gradients, known)):
            self._pieces = _whole_storages(gradients)
            self._known_gradients = gradients if self._pieces else []  # others could not be freed
        return self._pieces or gradients


def _whole_storages(tensors: list[Tensor]) -> list[Tensor]:
    """Return a tensor for each storage of dense tensors; [] unless they share storages and fill each once."""
    by_storage: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return []
        by_storage[tensor.untyped_storage().data_ptr()].append(tensor)
    if len(by_storage) == len(tensors) or not all(map(_fill_storage, by_storage.values())):
        return []
    return [
        torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
        for first, *_ in by_storage.values()
    ]


def _fill_storage(tensors: list[Tensor]) -> bool:
    """Return whether contiguous tensors of one storage cover it without gaps and overlaps."""
    end = 0
    for tensor in sorted(tensors, key=lambda each: (each.storage_offset(), each.numel())):
        if tensor.dtype != tensors[0].dtype or tensor.storage_offset() != end:
            return False
        end += tensor.numel()
    return end * tensors[0].element_size() == tensors[0].untyped_storage().nbytes()

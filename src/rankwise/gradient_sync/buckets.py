"""Average gradients over the ranks in few large buckets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.errors import ConfigurationError

__all__ = [
    "BUCKET_BYTES",
    "FlatGradients",
    "buckets_of",
    "keep_means",
    "mean_over_ranks",
    "reduce_gradients",
    "trained_among",
]


@final
class FlatGradients:
    """All gradients of some parameters, one tensor for those that share a memory which nothing else is in.

    With `gradient_as_bucket_view=True` these are the buckets of DDP: what is done to all gradients alike
    then takes one operation for each bucket.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._seen: list[Tensor] = []
        self._pieces: list[Tensor] = []

    def pieces(self) -> list[Tensor]:
        """Return tensors that make up the gradients, each element once."""
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        if len(gradients) != len(self._seen) or not all(map(is_, gradients, self._seen)):
            self._look_at(gradients)
        return self._pieces or gradients

    def _look_at(self, gradients: list[Tensor]) -> None:
        """Keep what the gradients are made of, if it is few pieces: others would be kept from being freed."""
        self._seen, self._pieces = [], []
        by_memory: dict[int, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_memory[gradient.untyped_storage().data_ptr()].append(gradient)
        if len(by_memory) < len(gradients) and all(map(_fill_their_memory, by_memory.values())):
            self._seen = gradients
            self._pieces = [_whole_memory(first) for first, *_ in by_memory.values()]


def _fill_their_memory(tensors: list[Tensor]) -> bool:
    """Return whether tensors that share a memory leave nothing of it out, and do not overlap."""
    if not all(each.layout is torch.strided and each.is_contiguous() for each in tensors):
        return False
    end = 0
    for tensor in sorted(tensors, key=lambda each: (each.storage_offset(), each.numel())):
        if tensor.dtype != tensors[0].dtype or tensor.storage_offset() != end:
            return False
        end += tensor.numel()
    return end * tensors[0].element_size() == tensors[0].untyped_storage().nbytes()


def _whole_memory(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


BUCKET_BYTES = 32 * 2**20
_EXACT = (torch.float32, torch.float64)


def reduce_gradients(
    parameters: Iterable[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> float | None:
    """Average the gradients of `parameters` over the ranks, in place.

    A gradient that exists on some ranks only counts as zero on the others, where it is created; one that
    exists nowhere stays None. The ranks agree on the buckets because these depend on the parameters alone:
    which gradients exist travels in the same all-reduce, one element per parameter.

    Collective: every rank must call this, with the same parameters in the same order.

    Args:
        parameters: what is trained; those that require no gradient are left out.
        group: the ranks to average over; all of them by default.
        weight: this rank's weight, if the mean of all ranks' weights is wanted too.
        bucket_bytes: how large a bucket may grow.

    Returns:
        The mean of the weights; None where none was given.

    Raises:
        ConfigurationError: for sparse gradients.
    """
    buckets = list(buckets_of(trained_among(parameters), bucket_bytes))
    # A weight travels with the first bucket, or alone where that one's numbers are too coarse for it.
    lends_room = bool(buckets) and buckets[0][0].dtype in _EXACT
    works: list[tuple[_Bucket, Any]] = []
    for number, workers in enumerate(buckets):
        lent = weight if number == 0 and lends_room else None
        bucket = _Bucket.filled(workers, lent, 1 / dist.get_world_size(group))
        works.append((bucket, dist.all_reduce(bucket.flat, group=group, async_op=True)))
    for bucket, work in works:
        work.wait()
        bucket.unpack()
    if weight is None:
        return None
    return float(works[0][0].flat[-1]) if lends_room else mean_over_ranks(weight, group)


def mean_over_ranks(weight: float, group: dist.ProcessGroup | None) -> float:
    """Return the mean of all ranks' weights, in one small all-reduce; this rank's where there is no group.

    Collective: every rank must call this.
    """
    if not dist.is_initialized():
        return weight
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor([weight], dtype=torch.double, device=device)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


@final
@dataclass
class _Bucket:
    """Some parameters' gradients, one after another; then one flag for each; then perhaps a weight."""

    workers: list[Tensor]
    flat: Tensor

    @classmethod
    def filled(cls, workers: list[Tensor], weight: float | None, share: float) -> _Bucket:
        first = workers[0]
        pieces = [
            first.new_zeros(member.numel()) if member.grad is None else member.grad.reshape(-1)
            for member in workers
        ]
        flags = [float(member.grad is not None) for member in workers]
        if weight is not None:
            flags.append(weight)
        tail = torch.tensor(flags, dtype=first.dtype).to(first.device, non_blocking=True)
        return cls(workers, torch.cat([*(piece.detach() for piece in pieces), tail]).mul_(share))

    def unpack(self) -> None:
        """Give each parameter its part, creating the gradients that only other ranks had."""
        sizes = [member.numel() for member in self.workers]
        *means, flags = self.flat.split([*sizes, self.flat.numel() - sum(sizes)])
        keep_means(self.workers, means, flags.tolist())


def keep_means(workers: Sequence[Tensor], means: Sequence[Tensor], exist: Sequence[float]) -> None:
    """Give each parameter its flat mean, where a number other than 0 says that any rank has a gradient."""
    targets, sources = [], []
    for member, mean, flag in zip(workers, means, exist, strict=False):
        if flag == 0:
            continue
        if member.grad is None:
            member.grad = torch.empty_like(member)
        targets.append(member.grad)
        sources.append(mean.view(member.shape))
    if targets:
        torch._foreach_copy_(targets, sources)


def buckets_of(trained: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield parameters of one dtype and device together, in an order that is the same on every rank."""
    open_buckets: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, str], int] = {}
    for parameter in trained:
        kind = (parameter.dtype, parameter.device.type)
        size = parameter.numel() * parameter.element_size()
        if kind in open_buckets and sizes[kind] + size > bucket_bytes:
            yield open_buckets.pop(kind)
        if kind not in open_buckets:
            open_buckets[kind], sizes[kind] = [], 0
        open_buckets[kind].append(parameter)
        sizes[kind] += size
    yield from open_buckets.values()


def trained_among(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return those that require a gradient.

    Raises:
        ConfigurationError: for sparse gradients.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ConfigurationError(
                message='sync_mode="forced_sync" cannot average sparse gradients.',
                facts=f"a parameter of shape {tuple(parameter.shape)} has one.",
                remedy='use nn.Embedding(sparse=False), or sync_mode="single_auto_sync".',
            )
    return trained

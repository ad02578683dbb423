"""Compute the batch sizes of all ranks from the samplers, before any batch is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from rankwise.data.batch_stream import BatchStream
from rankwise.data.sampler import ShardedSampler

__all__ = ["BatchSizes", "batch_sizes"]


@final
@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of an epoch.

    Attributes:
        rank: this rank.
        num_replicas: the number of ranks.
        size_of: `size_of(rank, batch)` is a batch's number of samples; 0 after that rank's last batch.
    """

    rank: int
    num_replicas: int
    size_of: Callable[[int, int], int]

    def own(self, batch: int) -> int:
        """Return the number of samples of this rank's batch."""
        return self.size_of(self.rank, batch)

    def total(self, first: int, ends_by_rank: Sequence[int]) -> int:
        """Return the number of samples of all ranks' batches from `first` to before `ends_by_rank[rank]`."""
        return sum(
            self.size_of(rank, batch)
            for rank in range(self.num_replicas)
            for batch in range(first, ends_by_rank[rank])
        )


def batch_sizes(loader: Any) -> BatchSizes | None:
    """Return the batch sizes of a loader, which may be split over the ranks.

    Call it after `set_epoch`, because it draws the batches of a user's own batch sampler for the epoch.
    Batches are counted from the epoch's first one, also if the loader starts at a later one.

    Returns:
        None if they are unknown: for iterable data, loaders that are not a `DataLoader` or do not batch,
        samplers without length, and samplers whose length holds for one rank only.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    first = 0
    if isinstance(batches, BatchStream):
        first, batches = batches.first - batches.skipped, batches.batches
    if isinstance(batches, ShardedSampler):
        return _of_whole_batches(batches, first)
    return _of_samples(batches, first) if type(batches) is BatchSampler else None


def _of_samples(batches: Any, first: int) -> BatchSizes | None:
    """Return the sizes of batches that torch's `BatchSampler` makes of each rank's samples."""
    sampler: Any = batches.sampler
    try:
        lengths = _lengths(sampler)
    except TypeError:  # a sampler without length
        return None
    if lengths is None:
        return None
    size, drops_last = batches.batch_size, batches.drop_last

    def size_of(rank: int, batch: int) -> int:
        left = max(0, min(size, lengths[rank] - (batch - first) * size))
        return 0 if drops_last and left < size else left

    is_split = isinstance(sampler, (ShardedSampler, DistributedSampler))
    return BatchSizes(sampler.rank if is_split else 0, len(lengths), size_of)


def _lengths(sampler: Any) -> list[int] | None:
    """Return the number of samples of each rank; None if only this rank's is known."""
    if isinstance(sampler, ShardedSampler):
        return [sampler.length_of(rank) for rank in range(sampler.num_replicas)]
    if isinstance(sampler, DistributedSampler):
        lengths = [len(sampler)] * sampler.num_replicas
        return lengths if sum(lengths) == sampler.total_size else None
    return [len(sampler)]


def _of_whole_batches(sampler: ShardedSampler, first: int) -> BatchSizes:
    """Return the sizes of the user's own batches, which are distributed over the ranks as a whole."""
    sizes = [[len(batch) for batch in batches] for batches in sampler.items_by_rank()]

    def size_of(rank: int, batch: int) -> int:
        return sizes[rank][batch - first] if 0 <= batch - first < len(sizes[rank]) else 0

    return BatchSizes(sampler.rank, sampler.num_replicas, size_of)

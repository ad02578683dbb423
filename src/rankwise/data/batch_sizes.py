"""How many samples each rank's batches have, told from the samplers, before any of them is read."""

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
        rank: whose batches these are.
        num_replicas: over how many ranks the data is split.
        size_of: `size_of(rank, batch)`: a batch's number of samples; 0 beyond that rank's last one.
    """

    rank: int
    num_replicas: int
    size_of: Callable[[int, int], int]

    def own(self, batch: int) -> int:
        """Return how many samples this rank's batch has."""
        return self.size_of(self.rank, batch)

    def total(self, first: int, ends_by_rank: Sequence[int]) -> int:
        """Return how many samples the ranks' batches from `first` to before `beyond[rank]` have together."""
        return sum(
            self.size_of(rank, batch)
            for rank in range(self.num_replicas)
            for batch in range(first, ends_by_rank[rank])
        )


def batch_sizes(loader: Any) -> BatchSizes | None:
    """Return the batch sizes of a loader that is split over the ranks, or of a whole one.

    Call it after `set_epoch`: batches of a user's own batch sampler are drawn for the epoch. Batches are
    counted from the epoch's first one on, also where the loader goes on within it.

    Returns:
        None where nobody knows them: iterable data, loaders that are no `DataLoader`, samplers without
        length, or whose length is one rank's alone, and loaders that do not batch.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    first = 0
    if isinstance(batches, BatchStream):
        first, batches = batches.first - batches.skipped, batches.batches
    if isinstance(batches, ShardedSampler):
        return _of_dealt_batches(batches, first)
    return _of_plain_batches(batches, first) if type(batches) is BatchSampler else None


def _of_plain_batches(batches: Any, first: int) -> BatchSizes | None:
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
    """Return how many samples each rank has; None where a rank knows only its own."""
    if isinstance(sampler, ShardedSampler):
        return [sampler.length_of(rank) for rank in range(sampler.num_replicas)]
    if isinstance(sampler, DistributedSampler):
        lengths = [len(sampler)] * sampler.num_replicas
        return lengths if sum(lengths) == sampler.total_size else None
    return [len(sampler)]


def _of_dealt_batches(sampler: ShardedSampler, first: int) -> BatchSizes:
    """Return the sizes of whole batches that were dealt out, each of its own size."""
    sizes = [[len(batch) for batch in batches] for batches in sampler.items_by_rank()]

    def size_of(rank: int, batch: int) -> int:
        return sizes[rank][batch - first] if 0 <= batch - first < len(sizes[rank]) else 0

    return BatchSizes(sampler.rank, sampler.num_replicas, size_of)

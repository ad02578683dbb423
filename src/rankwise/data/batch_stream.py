"""`BatchStream`: a loader's batches of indices, starting at any batch, with a seed for each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar, final

from torch.utils.data import DataLoader, Sampler

from rankwise.data.random_state import isolated_random_state, mixed_seed, seed_process
from rankwise.data.sampler import ShardedSampler, has_length, own_generators, own_seed, set_epoch_of
from rankwise.data.sharding import is_shardable, with_indices_from

__all__ = ["BatchStream", "SeededBatch", "sharded_sampler_of", "with_batch_stream"]

Loader = TypeVar("Loader", bound="DataLoader[Any]")


@final
class SeededBatch(list[Any]):
    """Indices of a batch; iterating over them seeds the process's random numbers.

    So a DataLoader's worker draws the same random numbers for a batch, whatever it has loaded before.
    """

    def __init__(self, indices: list[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        seed_process(self.seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[type[SeededBatch], tuple[list[Any], int]]:
        return SeededBatch, (self[:], self.seed)


@final
class BatchStream(Sampler[Any]):
    """Yield the batches of a batch sampler, in an order that depends on seed and epoch alone.

    Args:
        batches: the batch sampler.
        seed: determines the order, unless the sampler has a generator of the user's: then its seed does.
        rank: the rank that reads these batches.
        worker_seed: for loaders with workers: makes each batch a `SeededBatch`, with a seed made of this one.

    Attributes:
        first: the number in the epoch of the first batch that is yielded.
        skipped: the number of the sampler's batches that are skipped before it.
    """

    def __init__(self, batches: Any, *, seed: int, rank: int, worker_seed: int | None) -> None:
        self.batches = batches
        self.sampler: Any = getattr(batches, "sampler", None)
        self.seed = seed
        self.rank = rank
        self.worker_seed = worker_seed
        self.epoch = self.first = self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also in a batch sampler that has `set_epoch`."""
        self.epoch = epoch
        set_epoch_of(epoch, self.batches)

    def __len__(self) -> int:
        return max(0, len(self.batches) - self.skipped)

    def __iter__(self) -> Iterator[Any]:
        remaining = islice(self._drawn(), self.skipped, None)
        return remaining if self.worker_seed is None else self._seeded(remaining, self.worker_seed)

    def _drawn(self) -> Iterator[Any]:
        is_ours = isinstance(self.sampler, ShardedSampler) or isinstance(self.batches, ShardedSampler)
        if is_ours or not has_length(self.batches):  # a `ShardedSampler` seeds itself; others may be endless
            return iter(self.batches)
        user_seed = own_seed(self.batches)
        seed = mixed_seed(self.seed if user_seed is None else user_seed, self.epoch)
        with isolated_random_state(seed, *own_generators(self.batches)):
            return iter(list(self.batches))

    def _seeded(self, batches: Iterator[Any], worker_seed: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, self.first):
            seed = mixed_seed(worker_seed, self.epoch, self.rank, number)
            yield SeededBatch(batch, seed) if type(batch) is list else batch


def with_batch_stream(loader: Loader, *, seed: int, rank: int, worker_seed: int) -> Loader:
    """Return `loader` with its batches of indices as a `BatchStream`; unchanged if it has none."""
    if not is_shardable(loader) or loader.batch_sampler is None:
        return loader
    for_workers = worker_seed if loader.num_workers > 0 else None
    stream = BatchStream(loader.batch_sampler, seed=seed, rank=rank, worker_seed=for_workers)
    return with_indices_from(loader, stream)


def sharded_sampler_of(loader: Any) -> ShardedSampler | None:
    """Return the `ShardedSampler` that splits `loader` over the ranks, if there is one."""
    outer: Any = getattr(loader, "batch_sampler", None)
    inner = outer.batches if isinstance(outer, BatchStream) else outer
    candidates = (inner, getattr(outer, "sampler", None), getattr(loader, "sampler", None))
    return next((found for found in candidates if isinstance(found, ShardedSampler)), None)

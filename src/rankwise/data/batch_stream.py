"""`BatchStream`: a loader's batches of indices, from any of them on, each with a seed for who loads it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, final

from torch.utils.data import DataLoader, Sampler
from typing_extensions import TypeVar

from rankwise.data.random_state import isolated_random_state, mixed_seed, seed_process
from rankwise.data.sampler import ShardedSampler, has_length, own_generators, own_seed, set_epoch_of
from rankwise.data.sharding import is_shardable, with_stream

__all__ = ["BatchStream", "SeededBatch", "sharded_sampler_of", "with_batch_stream"]

Loader = TypeVar("Loader", bound="DataLoader[Any]")


@final
class SeededBatch(list[Any]):
    """Indices of a batch; who iterates over them, to load the samples, seeds its random numbers first.

    So a DataLoader's worker draws the same numbers for a batch, whatever it has loaded before.
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
    """Yield what a batch sampler yields, in an order that depends on seed and epoch alone.

    Args:
        batches: the batch sampler.
        seed: gives the order, unless the user has given the sampler a generator: then what seeded that does.
        rank: whose batches these are.
        worker_seed: for loaders with workers: what they draw depends on it, as each batch is a `SeededBatch`.

    Attributes:
        first: the number in the epoch of the first batch that is yielded.
        skipped: how many batches of the sampler are passed over before it.
    """

    def __init__(self, batches: Any, *, seed: int, rank: int, worker_seed: int | None) -> None:
        self.batches = batches
        self.sampler: Any = getattr(batches, "sampler", None)
        self.seed = seed
        self.rank = rank
        self.worker_seed = worker_seed
        self.epoch = self.first = self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; passed on to a batch sampler that has epochs too."""
        self.epoch = epoch
        set_epoch_of(epoch, self.batches)

    def __len__(self) -> int:
        return max(0, len(self.batches) - self.skipped)

    def __iter__(self) -> Iterator[Any]:
        remaining = islice(self._drawn(), self.skipped, None)
        return remaining if self.worker_seed is None else self._seeded(remaining, self.worker_seed)

    def _drawn(self) -> Iterator[Any]:
        is_ours = isinstance(self.sampler, ShardedSampler) or isinstance(self.batches, ShardedSampler)
        if is_ours or not has_length(self.batches):  # the first draw for themselves, the others have no end
            return iter(self.batches)
        given = own_seed(self.batches)
        seed = mixed_seed(self.seed if given is None else given, self.epoch)
        with isolated_random_state(seed, *own_generators(self.batches)):
            return iter(list(self.batches))

    def _seeded(self, batches: Iterator[Any], worker_seed: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, self.first):
            seed = mixed_seed(worker_seed, self.epoch, self.rank, number)
            yield SeededBatch(batch, seed) if type(batch) is list else batch


def with_batch_stream(loader: Loader, *, seed: int, rank: int, worker_seed: int) -> Loader:
    """Return `loader` with its batches of indices as a `BatchStream`; as it is where it has none."""
    if not is_shardable(loader) or loader.batch_sampler is None:
        return loader
    for_workers = worker_seed if loader.num_workers > 0 else None
    return with_stream(
        loader, BatchStream(loader.batch_sampler, seed=seed, rank=rank, worker_seed=for_workers)
    )


def sharded_sampler_of(loader: Any) -> ShardedSampler | None:
    """Return the sampler that splits `loader` over the ranks, where it is one of ours."""
    outer: Any = getattr(loader, "batch_sampler", None)
    inner = outer.batches if isinstance(outer, BatchStream) else outer
    candidates = (inner, getattr(outer, "sampler", None), getattr(loader, "sampler", None))
    return next((found for found in candidates if isinstance(found, ShardedSampler)), None)

"""A loader's batches of indices: started at any batch, with a seed for each; and the sizes on all ranks."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, TypeVar, final

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from rankwise.data.sampler import ShardedSampler, length_of, own_generators, own_seed, set_epoch_of
from rankwise.data.sharding import Loader, is_shardable, with_attributes, with_indices_from
from rankwise.nested import contained, walked
from rankwise.processes.signals import interrupts_blocked
from rankwise.seed import isolated_random_state, mixed_seed, seed_process

T = TypeVar("T")


@final
class SeededBatch(list[Any]):
    """Indices of a batch; iterating over them seeds the process's random numbers.

    So a worker draws the same random numbers for a batch, whatever it has loaded before.
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

    If the sampler has a generator of the user's, its seed replaces `seed`. With `worker_seed`, for loaders
    with workers, each batch is a `SeededBatch`, with a seed made of that one.
    """

    def __init__(self, batches: Any, *, seed: int, rank: int, worker_seed: int | None) -> None:
        self.batches = batches
        self.sampler: Any = getattr(batches, "sampler", None)
        self.seed = seed
        self.rank = rank
        self.worker_seed = worker_seed
        self.epoch = 0
        self.first = 0  # the number in the epoch of the first batch that is yielded
        self.skipped = 0  # how many of the sampler's batches are skipped before it
        self.variant: tuple[int, ...] = ()  # numbers that change the order too

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
        if is_ours or math.isinf(length_of(self.batches)):
            return iter(self.batches)  # a `ShardedSampler` seeds itself; others may be endless
        user_seed = own_seed(self.batches)
        seed = mixed_seed(self.seed if user_seed is None else user_seed, self.epoch, *self.variant)
        with isolated_random_state(seed, *own_generators(self.batches)):
            return iter(list(self.batches))

    def _seeded(self, batches: Iterator[Any], worker_seed: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, self.first):
            seed = mixed_seed(worker_seed, self.epoch, self.rank, number, *self.variant)
            yield SeededBatch(batch, seed) if type(batch) is list else batch


def with_batch_stream(loader: Loader, *, seed: int, rank: int) -> tuple[Loader, int]:
    """Return `loader` with its batches of indices, if any, as a `BatchStream`; and a seed.

    The seed is for `start_with_seed`, made of `seed` and that of the loader's own generator, if it has one.
    """
    generator = getattr(loader, "generator", None)
    own = seed if generator is None else mixed_seed(seed, generator.initial_seed())
    if not is_shardable(loader) or loader.batch_sampler is None:
        return loader, own
    for_workers = own if loader.num_workers > 0 else None
    stream = BatchStream(loader.batch_sampler, seed=seed, rank=rank, worker_seed=for_workers)
    return with_indices_from(loader, stream), own


def start_with_seed(loader: Any, start: Callable[[], Iterator[T]], *seed: int) -> Iterator[T]:
    """Return the batches of a loader that `start` returns; what its workers draw depends on `seed` alone."""
    generator = getattr(loader, "generator", None)
    with isolated_random_state(mixed_seed(*seed), *([] if generator is None else [generator])):
        return start()


def set_epoch_of_loader(epoch: int, loader: Any) -> None:
    """Call `set_epoch` of samplers and iterable data sets, which then shuffle differently."""
    dataset = getattr(loader, "dataset", None)
    iterable = dataset if isinstance(dataset, IterableDataset) else None
    set_epoch_of(epoch, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None), iterable)


def sharded_sampler_of(loader: Any) -> ShardedSampler | None:
    """Return the `ShardedSampler` that splits `loader` over the ranks, if there is one."""
    outer: Any = getattr(loader, "batch_sampler", None)
    inner = outer.batches if isinstance(outer, BatchStream) else outer
    candidates = (inner, getattr(outer, "sampler", None), getattr(loader, "sampler", None))
    return next((found for found in candidates if isinstance(found, ShardedSampler)), None)


DescribedBatch = tuple[Any, int | None, list[Any] | None]
"""A batch, the number of samples in it, and their indices; None for unknown."""


def described_batches(loader: Any) -> Callable[[], Iterator[DescribedBatch]]:
    """Return a function that starts a loader's workers, and returns its batches.

    The numbers are known for a plain `DataLoader` that collates samples: from its batches of indices or, if
    it has none or loads them in any order, from the input of its collate function. They are not known if
    nothing in the batch has that length: a collate function, or `__getitems__`, has left samples out, or made
    more.
    """
    describe: Callable[[Any], DescribedBatch] = _undescribed
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if is_plain and loader.batch_sampler is not None:
        is_in_order = not loader.num_workers or getattr(loader, "in_order", True)
        if is_in_order and not isinstance(loader.dataset, IterableDataset):
            counted = _CountedBatches(loader.batch_sampler)
            loader, describe = with_indices_from(loader, counted), counted.described
        elif getattr(loader.dataset, "__getitems__", None) is None:  # which may return anything
            loader = with_attributes(loader, collate_fn=partial(_counted_collate, loader.collate_fn))
            describe = tuple
    return lambda: map(_checked, map(describe, _begun(loader)))


def _undescribed(batch: Any) -> DescribedBatch:
    return batch, None, None


def _checked(described: DescribedBatch) -> DescribedBatch:
    batch, size, indices = described
    return batch, size if size is None or _has_size(batch, size) else None, indices


def _has_size(batch: Any, size: int) -> bool:
    """Return whether a batch may hold so many samples: something in it, if anything, has that length.

    The length is the first or second dimension of a tensor or array, or the length of a list or tuple. A
    single sample need not be in a list.
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if size == 1 or (type(first) is Tensor and first.ndim and first.shape[0] == size):  # as most batches are
        return True
    lengths = [length for item in walked(batch, _parts_of) for length in _lengths_of(item)]
    return size in lengths or not lengths


def _parts_of(value: Any) -> Iterable[Any] | None:
    """Return the parts of a container in a batch."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return contained(value)


def _lengths_of(value: Any) -> Iterable[int]:
    if isinstance(value, (list, tuple)):
        return (len(value),)
    shape = getattr(value, "shape", ())
    return shape[:2] if isinstance(shape, tuple) else ()


def _begun(loader: Any) -> Iterator[Any]:
    """Return a loader's batches; its workers block SIGINT: a rank that is to stop still needs them."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    context: Any = loader.multiprocessing_context or multiprocessing.get_context()
    if context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # otherwise it starts later, and lets SIGINT through again
    with interrupts_blocked():
        return iter(loader)


def _counted_collate(collate: Callable[[Any], Any], samples: list[Any]) -> DescribedBatch:
    return collate(samples), len(samples), None


@final
class _CountedBatches(Sampler[Any]):
    """Yield a batch sampler's batches of indices, and keep each until it is taken."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._taken: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._taken.clear()
        for batch in self._batches:
            self._taken.append(batch)
            yield batch

    def described(self, batch: Any) -> DescribedBatch:
        indices = self._taken.popleft()
        size = length_of(indices)
        if math.isinf(size):
            return batch, None, None
        return batch, int(size), indices[:] if isinstance(indices, list) else None


class BatchSizes(NamedTuple):
    """The batch sizes of an epoch: `size_of(rank, batch)` is 0 after that rank's last batch."""

    rank: int
    num_replicas: int
    size_of: Callable[[int, int], int]


def batch_sizes(loader: Any) -> BatchSizes | None:
    """Return the batch sizes of a `DataLoader` with indices; None if a rank cannot compute the others'.

    Call it after `set_epoch`, because it draws the batches of a user's own batch sampler for the epoch.
    Batches are counted from the epoch's first one, also if the loader starts at a later one.
    """
    if not is_shardable(loader):
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
    lengths = None if math.isinf(length_of(sampler)) else _lengths(sampler)
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

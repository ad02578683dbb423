"""This rank's batches of training: of one loader, or of several that are combined."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, final

from torch.utils.data import DataLoader, IterableDataset

from rankwise.data.batches import (
    BatchSizes,
    BatchStream,
    batch_sizes,
    sharded_sampler_of,
    with_batch_stream,
)
from rankwise.data.combined_loader import CombinedLoader, rows
from rankwise.data.sampler import ShardedSampler, length_of
from rankwise.data.sharding import is_shardable
from rankwise.errors import ConfigurationError
from rankwise.seed import isolated_random_state, mixed_seed
from rankwise.trainer.data_loaders import LoaderShard, first_of, limited

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.state import Progress


class TrainData(Protocol):
    """This rank's batches of an epoch, from its first batch or from where an earlier run stopped.

    The batches, and what a loader's workers draw, depend only on the seed (of the user's generator, if there
    is one) and the epoch. To continue within an iterable data set, its batches are read again.

    Attributes:
        loader: this rank's part of the loader, or of all of them.
        loaders: the same as a list.
        num_batches: how many batches the epoch has on this rank, including those of an earlier run.
        is_certain: whether that number is exact; otherwise it is an upper limit.
        lengths: of several loaders, how many batches each has on this rank; `inf` for unknown.
        limit: the Trainer's `limit_train_batches`.
        samples_per_batch: how many items of the index stream all ranks together use for a batch.
        replayed: the last batch that was read again to continue from where an earlier run stopped; or None.
    """

    loader: Any
    loaders: list[Any]
    num_batches: float
    is_certain: bool
    lengths: tuple[float, ...]
    limit: float
    samples_per_batch: int
    replayed: Any

    def place(self, progress: Progress) -> None:
        """Make the next `start` begin at the position of `progress` in the current epoch.

        Raises:
            ConfigurationError: within an epoch of data that rankwise does not split by index, if its first
                batches were for another number of ranks; on every rank.
        """

    def start(self, progress: Progress) -> Iterator[Any]:
        """Start the loader's workers, if it has any; return the batches that are left."""

    def take_size(self) -> int | None:
        """Return the number of samples in the batch that follows the last one asked for; None if unknown."""

    def batch_sizes(self) -> BatchSizes | None:
        """Return the sizes of all ranks' batches; None if a rank cannot compute those of others."""

    @property
    def is_exact(self) -> bool:
        """Whether batches are loaded in this process, and their number is known.

        Then none may be loaded ahead: its random numbers must come after those of the training step.
        """


@final
class TrainLoader:
    """One loader of training batches on this rank, with its seeds; loader `number` of several.

    Attributes:
        loader: its batches of indices come from a `BatchStream`, if it has indices.
        is_certain: whether its length is exact.
    """

    def __init__(self, shard: LoaderShard, seed: int, rank: int, number: int = 0) -> None:
        given: Any = shard.loader
        generator = getattr(given, "generator", None)
        self._seed = seed if generator is None else mixed_seed(seed, generator.initial_seed())
        self._rank, self._number = rank, number
        self.loader: Any = with_batch_stream(given, seed=seed, rank=rank, worker_seed=self._seed)
        self.shard = LoaderShard(self.loader, shard.num_batches)
        is_iterable = isinstance(given, DataLoader) and isinstance(given.dataset, IterableDataset)
        self.is_certain = not is_iterable and not math.isinf(length_of(given))
        self._epoch, self._length = 0, math.inf

    @property
    def stream(self) -> BatchStream | None:
        """The loader's batches of indices, if it has any."""
        stream = getattr(self.loader, "batch_sampler", None)
        return stream if isinstance(stream, BatchStream) else None

    @property
    def is_here(self) -> bool:
        """Whether batches are loaded in this process, by indices."""
        return is_shardable(self.loader) and self.loader.num_workers == 0

    def begin(self, epoch: int, variant: tuple[int, ...] = ()) -> Iterator[Any]:
        """Start the loader's workers, if it has any, in a random state of their own; return its batches."""
        seed = mixed_seed(self._seed, epoch, self._rank, *variant)
        generator = getattr(self.loader, "generator", None)
        with isolated_random_state(seed, *([] if generator is None else [generator])):
            return iter(self.shard.sized)

    def place(self, epoch: int) -> float:
        """Begin an epoch at its first batch; return how many the loader has."""
        self._epoch = epoch
        self.shard.set_epoch(epoch)
        self._set_position(0, 0)
        self._length = length_of(self.loader)
        return self._length

    def begin_pass(self, number: int, skipped: int = 0) -> Iterator[Any]:
        """Begin a pass over the data of the epoch; a later one has another order."""
        self._set_position(number, skipped)
        return self.begin(self._epoch, self._variant(number))

    def _set_position(self, number: int, skipped: int) -> None:
        stream, sampler, variant = self.stream, sharded_sampler_of(self.loader), self._variant(number)
        if sampler is not None:
            sampler.skip = 0
            sampler.set_variant(variant)
        if stream is not None:
            length = 2**32 if math.isinf(self._length) else int(self._length)
            stream.first = number * length + skipped
            stream.skipped, stream.variant = skipped, variant

    def _variant(self, number: int) -> tuple[int, ...]:
        """Return the numbers by which the order differs from that of the first loader in its first pass."""
        return (self._number, number) if self._number or number else ()


@final
class TrainDataShard:
    """The batches of one loader; see `TrainData`."""

    lengths: tuple[float, ...] = ()

    def __init__(self, shard: LoaderShard, seed: int, limit: float, strategy: Strategy) -> None:
        self.limit = limit
        self._train = train = TrainLoader(shard, seed, strategy.global_rank)
        self.loader, self._shard = train.loader, train.shard
        self.loaders = [train.loader]
        self.num_batches = shard.num_batches
        self.is_certain = train.is_certain
        replicas = strategy.distributed_sampler_kwargs["num_replicas"]
        self.samples_per_batch = replicas * _batch_size_of_samples(self.loader)
        self._replayed = 0
        self.replayed: Any = None
        self.take_size = self._shard.take_size

    def place(self, progress: Progress) -> None:
        """See `TrainData.place`."""
        done, self._replayed = progress.batches_done, 0
        self._shard.set_epoch(progress.current_epoch)
        sampler, stream = sharded_sampler_of(self.loader), getattr(self.loader, "batch_sampler", None)
        if isinstance(stream, BatchStream):
            stream.first, stream.skipped = done, 0 if sampler is not None else done
        if sampler is not None:
            sampler.skip = progress.samples_done
        elif progress.samples_done != done * self.samples_per_batch:
            raise _other_ranks_error(progress)
        elif not isinstance(stream, BatchStream):
            self._replayed = done
        left = length_of(self.loader)
        if sampler is not None and not left and not self._has_any(sampler):
            done = 0  # there is no batch that this rank could repeat, either
        self.num_batches = limited(left + (0 if self._replayed else done), self.limit)

    def _has_any(self, sampler: ShardedSampler) -> bool:
        skip, sampler.skip = sampler.skip, 0
        try:
            return length_of(self.loader) > 0
        finally:
            sampler.skip = skip

    def start(self, progress: Progress) -> Iterator[Any]:
        """See `TrainData.start`."""
        batches = self._train.begin(progress.current_epoch)
        self.replayed = None
        for batch in islice(batches, self._replayed):  # there may be fewer now
            self.replayed = batch
        self._shard.sized.sizes.clear()
        return first_of(self.num_batches - progress.batches_done, batches)

    def batch_sizes(self) -> BatchSizes | None:
        """See `TrainData.batch_sizes`."""
        return batch_sizes(self.loader)

    @property
    def is_exact(self) -> bool:
        """See `TrainData.is_exact`."""
        return self._train.is_here and not math.isinf(self.num_batches)


@final
class CombinedTrainData:
    """The batches of several loaders, each split over the ranks; see `TrainData`.

    A batch counts as many samples as the part of its first loader: the first that has one. A loader that
    begins again within an epoch has another order then. A run continues within an epoch on the same number of
    ranks: each loader at its own batch, or, if there is one of unknown length, by reading all again.
    """

    def __init__(
        self,
        combination: CombinedLoader,
        shards: list[LoaderShard],
        seed: int,
        limit: float,
        strategy: Strategy,
    ) -> None:
        self.limit = limit
        rank = strategy.global_rank
        self._parts = [TrainLoader(shard, seed, rank, number) for number, shard in enumerate(shards)]
        self._given = shards
        self._combination = combination
        self.loaders = [part.loader for part in self._parts]
        self.loader: Any = CombinedLoader(combination.restored(self.loaders), combination.mode)
        self.is_certain = all(part.is_certain for part in self._parts)
        self._skips = self.is_certain and all(part.stream is not None for part in self._parts)
        self.samples_per_batch = strategy.distributed_sampler_kwargs["num_replicas"]
        self.replayed: Any = None
        self._taken: deque[tuple[int | None, list[list[Any] | None]]] = deque()
        self._set_lengths([length_of(part.loader) for part in self._parts])
        if combination.mode == "max_size" and not self.is_certain and strategy.world_size > 1:
            raise ConfigurationError(
                message="CombinedLoader(mode='max_size') needs loaders whose lengths are known, with several "
                "ranks.",
                facts="a loader that ends on one rank before another would leave it with None alone.",
                remedy='the mode "min_size" or "max_size_cycle".',
            )

    def _set_lengths(self, lengths: list[float]) -> None:
        self.lengths = tuple(
            length if part.is_certain else math.inf for part, length in zip(self._parts, lengths, strict=True)
        )
        self.num_batches = limited(self._combination.length(lengths), self.limit)

    def place(self, progress: Progress) -> None:
        """See `TrainData.place`."""
        if progress.samples_done != progress.batches_done * self.samples_per_batch:
            raise _other_ranks_error(progress)
        self._set_lengths([part.place(progress.current_epoch) for part in self._parts])

    def start(self, progress: Progress) -> Iterator[Any]:
        """See `TrainData.start`."""
        done, mode = progress.batches_done, self._combination.mode
        positions = [self._position(done, length) for length in self.lengths]
        first = {number: skipped for number, (_, skipped) in enumerate(positions) if skipped}
        starts = [
            partial(self._begin, number, {positions[number][0]: first.get(number, 0)})
            for number in range(len(self._parts))
        ]
        found = rows(mode, starts, [number for number, _ in positions])
        for _ in islice(found, 0 if self._skips else done):
            pass
        self._taken.clear()
        return first_of(self.num_batches - done, self._batches(found))

    def _position(self, done: int, length: float) -> tuple[int, int]:
        """Return the number of the pass, and the batch in it, with which a loader continues."""
        if not self._skips or not done:
            return 0, 0
        if self._combination.mode != "max_size_cycle":
            return 0, int(min(done, length))
        # A pass that has ended begins again when its next batch is asked for.
        return (done - 1) // int(length), (done - 1) % int(length) + 1

    def _begin(self, number: int, skipped: dict[int, int], pass_number: int) -> Iterator[Any]:
        """Yield the batches of a pass over a loader, each with its size and indices."""
        part = self._parts[number]
        for batch in part.begin_pass(pass_number, skipped.pop(pass_number, 0)):
            size = part.shard.take_size()
            yield batch, size, part.shard.batch_indices

    def _batches(self, found: Iterator[list[Any]]) -> Iterator[Any]:
        for row in found:
            sizes = [size for _, size, _ in filter(None, row)]
            self._taken.append((sizes[0], [part and part[2] for part in row]))
            yield self._combination.restored([part and part[0] for part in row])

    def take_size(self) -> int | None:
        """See `TrainData.take_size`."""
        size, indices = self._taken.popleft()
        for shard, each in zip(self._given, indices, strict=True):
            shard.batch_indices = each
        return size

    def batch_sizes(self) -> BatchSizes | None:
        """See `TrainData.batch_sizes`."""
        found = [batch_sizes(loader) for loader in self.loaders]
        sizes = [each for each in found if each is not None]
        if not self.is_certain or len(sizes) < len(found):
            return None
        if len({(each.rank, each.num_replicas) for each in sizes}) > 1:
            return None
        is_cycled = self._combination.mode == "max_size_cycle"
        if is_cycled and self.lengths[0] < max(self.lengths) and not _has_fixed_sizes(self.loaders[0]):
            return None

        def size_of(rank: int, batch: int) -> int:
            if is_cycled:
                return sizes[0].size_of(rank, batch % int(self.lengths[0]))
            return next(filter(None, (each.size_of(rank, batch) for each in sizes)), 0)

        return BatchSizes(sizes[0].rank, sizes[0].num_replicas, size_of)

    @property
    def is_exact(self) -> bool:
        """See `TrainData.is_exact`."""
        return all(part.is_here for part in self._parts) and not math.isinf(self.num_batches)


def _has_fixed_sizes(loader: Any) -> bool:
    """Return whether each pass has batches of the same sizes: not for whole batches in another order."""
    stream = getattr(loader, "batch_sampler", None)
    return isinstance(stream, BatchStream) and not isinstance(stream.batches, ShardedSampler)


def _other_ranks_error(progress: Progress) -> ConfigurationError:
    done = progress.batches_done
    ranks = progress.samples_done / done
    return ConfigurationError(
        message="Training cannot continue within an epoch on another number of ranks: rankwise does not "
        "split these data by index, or there are several loaders, so nothing tells which samples are left.",
        facts=f"{done} batches of epoch {progress.current_epoch} are done, on {ranks:g} ranks.",
        remedy=f"continue on {ranks:g} ranks, or from a checkpoint written at the end of an epoch.",
    )


def _batch_size_of_samples(loader: Any) -> int:
    """Return how many items of the index stream are in a batch; 1 if whole batches are distributed."""
    stream = getattr(loader, "batch_sampler", None)
    if isinstance(stream, BatchStream) and isinstance(stream.sampler, ShardedSampler):
        return int(stream.batches.batch_size)
    return 1

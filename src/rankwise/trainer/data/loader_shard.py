"""Each rank's part of the data loaders; in training, of one loader or of several that are combined."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader, IterableDataset

from rankwise.data.batches import (
    BatchSizes,
    BatchStream,
    DescribedBatch,
    batch_sizes,
    described_batches,
    set_epoch_of_loader,
    sharded_sampler_of,
    start_with_seed,
    with_batch_stream,
)
from rankwise.data.combined_loader import CombinedLoader, Row, rows
from rankwise.data.sampler import ShardedSampler, length_of
from rankwise.data.sharding import is_shardable
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.state import Progress


@final
class LoaderShard:
    """One rank's part of a loader, and how many of its batches run; `inf` if unknown.

    In training, the order of the batches and what the loader's workers draw depend only on the seed (of the
    loader's own generator, if it has one), the epoch and the number of the pass.
    """

    def __init__(self, loader: Any, num_batches: float) -> None:
        self.loader = loader
        self.num_batches = num_batches
        # The sizes and indices of an evaluation's batches, until they are taken.
        self._taken: deque[tuple[int | None, list[Any] | None]] = deque()
        self.batch_indices: list[Any] | None = None  # of the batch whose size was taken last, if known
        self.stream: BatchStream | None = None  # of training, if the loader has batches of indices
        self.sampler: ShardedSampler | None = None  # in training, which splits the loader, if one does
        self._seed = self._epoch = 0
        self._variant: tuple[int, ...] = ()
        self._number = self._rank = 0
        self._length = math.inf

    @cached_property
    def _described(self) -> Callable[[], Iterator[DescribedBatch]]:
        return described_batches(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._taken.clear()
        return map(self._batch_of, first_of(self.num_batches, self._described()) if self.num_batches else ())

    def _batch_of(self, described: DescribedBatch) -> Any:
        batch, size, indices = described
        self._taken.append((size, indices))
        return batch

    def take_size(self) -> int | None:
        """Return the number of samples in the batch that follows the last one asked for; None if unknown."""
        size, self.batch_indices = self._taken.popleft()
        return size

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of samplers and iterable data sets, which then shuffle differently."""
        self._epoch = epoch
        set_epoch_of_loader(epoch, self.loader)

    def use_for_training(self, seed: int, rank: int, number: int) -> None:
        """Give the batches a seed; `number` is that of the loader among those that are combined."""
        self.loader, self._seed = with_batch_stream(self.loader, seed=seed, rank=rank)
        self._rank, self._number = rank, number
        stream = getattr(self.loader, "batch_sampler", None)
        self.stream = stream if isinstance(stream, BatchStream) else None
        self.sampler = sharded_sampler_of(self.loader)

    @property
    def is_certain(self) -> bool:
        """Whether the loader's length is exact."""
        is_iterable = isinstance(self.loader, DataLoader) and isinstance(self.loader.dataset, IterableDataset)
        return not is_iterable and not math.isinf(length_of(self.loader))

    def begin_epoch(self, epoch: int) -> float:
        """Go to the first batch of an epoch of training; return how many it has."""
        self.set_epoch(epoch)
        self.place()
        self._length = length_of(self.loader)
        return self._length

    def place(self, batches: int = 0, *, samples: int = 0, pass_number: int = 0) -> None:
        """Begin the next pass over an epoch's data after its first batches; a later pass has another order.

        `samples` of all ranks are counted instead of batches where rankwise splits the data.
        """
        numbers = (self._number, pass_number)
        self._variant = numbers if any(numbers) else ()
        if self.sampler is not None:
            self.sampler.skip = samples
            self.sampler.set_variant(self._variant)
        if self.stream is not None:
            length = 2**32 if math.isinf(self._length) else int(self._length)
            self.stream.first = pass_number * length + batches
            self.stream.skipped, self.stream.variant = 0 if samples else batches, self._variant

    def start(self) -> Iterator[DescribedBatch]:
        """Start the loader's workers, if it has any, in a random state of their own; return its batches."""
        seed = (self._seed, self._epoch, self._rank, *self._variant)
        return start_with_seed(self.loader, self._described, *seed)


def first_of(count: float, batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over the first `count` batches."""
    return islice(batches, None if math.isinf(count) else max(0, int(count)))


def limited(length: float, limit: float) -> float:
    """Return how many of `length` batches run with a limit: a number (int) or a fraction (float)."""
    if isinstance(limit, int):
        return min(length, limit)
    if limit in (0.0, 1.0):
        return length if limit else 0
    if math.isinf(length):
        raise ConfigurationError(
            message=f"A fraction ({limit}) of a loader without length cannot be taken.",
            remedy="limit it to a number of batches, such as limit_train_batches=100.",
        )
    return int(length * limit)


@final
class TrainData:
    """This rank's batches of an epoch, from its first batch or from where an earlier run stopped.

    The batches, and what a loader's workers draw, depend only on the seed (of the user's generator, if there
    is one) and the epoch. One loader that rankwise has split continues within an epoch on any number of
    ranks. Others continue on the same number: each at its own batch, or, within iterable data and data of
    unknown length, by reading all again.

    With several loaders, a batch counts as many samples as the part of its first loader: the first that has
    one. A loader that begins again within an epoch has another order then.
    """

    def __init__(
        self,
        shards: list[LoaderShard],
        seed: int,
        limit: float,
        strategy: Strategy,
        combination: CombinedLoader | None = None,
    ) -> None:
        for number, shard in enumerate(shards):
            shard.use_for_training(seed, strategy.global_rank, number)
        self.limit = limit  # limit_train_batches
        self._shards, self._combination = shards, combination
        self.loaders = [shard.loader for shard in shards]
        self._are_certain = [shard.is_certain for shard in shards]
        self.is_certain = all(self._are_certain)  # otherwise `num_batches` is an upper limit
        # How many items of the index stream all ranks use for a batch; of several loaders, one for each rank.
        self.samples_per_batch = strategy.distributed_sampler_kwargs["num_replicas"]
        self._is_split = self._skips = False
        self.replayed: Any = None  # the last batch that was read again to continue an earlier run
        self._taken: deque[Row] = deque()
        if combination is None:
            self.loader: Any = self.loaders[0]
            stream = shards[0].stream
            if stream is not None and isinstance(stream.sampler, ShardedSampler):  # no whole batches
                self.samples_per_batch *= int(stream.batches.batch_size)
            self._is_split = shards[0].sampler is not None
            self._skips = stream is not None and not self._is_split
            # num_batches: of the epoch on this rank, with those of an earlier run
            self._lengths, self.num_batches = [math.inf], shards[0].num_batches
            return
        self.loader = CombinedLoader(combination.restored(self.loaders), combination.mode)
        self._skips = self.is_certain and all(shard.stream is not None for shard in shards)
        self._set_lengths([length_of(loader) for loader in self.loaders])
        if combination.mode == "max_size" and not self.is_certain and strategy.world_size > 1:
            raise ConfigurationError(
                message="CombinedLoader(mode='max_size') needs loaders whose lengths are known, with several "
                "ranks.",
                facts="a loader that ends on one rank before another would leave it with None alone.",
                remedy='the mode "min_size" or "max_size_cycle".',
            )

    def _set_lengths(self, lengths: list[float]) -> None:
        self._lengths = lengths
        length = lengths[0] if self._combination is None else self._combination.length(lengths)
        self.num_batches = limited(length, self.limit)  # with those of an earlier run

    @property
    def lengths(self) -> tuple[float, ...]:
        """Of several loaders, how many batches each has on this rank; `inf` for unknown."""
        if self._combination is None:
            return ()
        both = zip(self._lengths, self._are_certain, strict=True)
        return tuple(length if is_certain else math.inf for length, is_certain in both)

    def place(self, progress: Progress) -> None:
        """Make the next `start` begin at the position of `progress`, or raise on every rank if it cannot."""
        done, samples = progress.batches_done, progress.samples_done
        if not self._is_split and samples != done * self.samples_per_batch:
            ranks = samples / done
            raise ConfigurationError(
                message="Training cannot continue within an epoch on another number of ranks: rankwise does "
                "not split these data by index, or there are several loaders, so nothing tells which samples "
                "are left.",
                facts=f"{done} batches of epoch {progress.current_epoch} are done, on {ranks:g} ranks.",
                remedy=f"continue on {ranks:g} ranks, or from a checkpoint written at the end of an epoch.",
            )
        lengths = [shard.begin_epoch(progress.current_epoch) for shard in self._shards]
        if self._is_split and done:
            self._shards[0].place(done, samples=samples)
            if lengths[0]:  # otherwise there is no batch that this rank could repeat, either
                lengths = [length_of(self.loader) + done]
        self._set_lengths(lengths)

    def start(self, progress: Progress) -> Iterator[Any]:
        """Start the loaders' workers, if there are any; return the batches that are left."""
        done, combination = progress.batches_done, self._combination
        passes = [0] * len(self._shards)
        for number, shard in enumerate(self._shards if done and self._skips else ()):
            passes[number], skipped = self._position(done, self._lengths[number])
            shard.place(skipped, pass_number=passes[number])
        if combination is None:
            found: Iterator[Any] = zip(self._shards[0].start())
        else:
            starts = [partial(self._begin, *each) for each in zip(self._shards, passes, strict=True)]
            found = rows(combination.mode, starts, passes)
        self.replayed = None
        for row in islice(found, 0 if self._skips or self._is_split else done):  # there may be fewer now
            self.replayed = self._joined(row)
        return first_of(self.num_batches - done, self._batches(found))

    def _position(self, done: int, length: float) -> tuple[int, int]:
        """Return the number of the pass, and the batch in it, with which a loader continues."""
        if self._combination is None or self._combination.mode != "max_size_cycle":
            return 0, int(min(done, length))
        # A pass that has ended begins again when its next batch is asked for.
        return (done - 1) // int(length), (done - 1) % int(length) + 1

    def _begin(self, shard: LoaderShard, first_pass: int, number: int) -> Iterator[DescribedBatch]:
        """Start a pass over a loader."""
        if number != first_pass:
            shard.place(pass_number=number)
        return shard.start()

    def _batches(self, found: Iterator[Row]) -> Iterator[Any]:
        self._taken.clear()
        for row in found:
            self._taken.append(row)
            yield self._joined(row)

    def _joined(self, row: Row) -> Any:
        """Return the batch that the loaders' batches make; None stands for a loader that has ended."""
        if self._combination is None:
            return row[0][0]
        return self._combination.restored([part and part[0] for part in row])

    def take_size(self) -> int | None:
        """Return the number of samples in the batch that follows the last one asked for; None if unknown."""
        row = self._taken.popleft()
        for shard, part in zip(self._shards, row, strict=True):
            shard.batch_indices = part and part[2]
        first: DescribedBatch = next(filter(None, row))
        return first[1]

    def batch_sizes(self) -> BatchSizes | None:
        """Return the sizes of all ranks' batches; None if a rank cannot compute those of others."""
        found = [batch_sizes(loader) for loader in self.loaders]
        if self._combination is None:
            return found[0]
        sizes = [each for each in found if each is not None]
        if not self.is_certain or len(sizes) < len(found):
            return None
        if len({(each.rank, each.num_replicas) for each in sizes}) > 1:
            return None
        is_cycled, lengths = self._combination.mode == "max_size_cycle", self._lengths
        if is_cycled and lengths[0] < max(lengths):
            stream = self._shards[0].stream
            if stream is None or isinstance(stream.batches, ShardedSampler):
                return None  # whole batches have another order, and so other sizes, in each pass

        def size_of(rank: int, batch: int) -> int:
            if is_cycled:
                return sizes[0].size_of(rank, batch % int(lengths[0]))
            return next(filter(None, (each.size_of(rank, batch) for each in sizes)), 0)

        return BatchSizes(sizes[0].rank, sizes[0].num_replicas, size_of)

    @property
    def is_exact(self) -> bool:
        """Whether batches are loaded in this process, and their number is known.

        Then none may be loaded ahead: its random numbers must come after those of the training step.
        """
        are_loaded_here = all(is_shardable(loader) and loader.num_workers == 0 for loader in self.loaders)
        return are_loaded_here and not math.isinf(self.num_batches)

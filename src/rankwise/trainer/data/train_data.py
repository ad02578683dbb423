"""This rank's batches of training: of one loader, or of several that are combined."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from rankwise.data.batches import BatchSizes, BatchStream, DescribedBatch, batch_sizes
from rankwise.data.combined_loader import CombinedLoader, Row, rows
from rankwise.data.sampler import ShardedSampler, length_of
from rankwise.errors import ConfigurationError
from rankwise.trainer.data.loader_shard import LoaderShard, first_of, limited

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.state import Progress


@final
class TrainData:
    """This rank's batches of an epoch, from its first batch or from where an earlier run stopped.

    The batches, and what a loader's workers draw, depend only on the seed (of the user's generator, if there
    is one) and the epoch. One loader that rankwise has split continues within an epoch on any number of
    ranks. Others continue on the same number: each at its own batch, or, within iterable data and data of
    unknown length, by reading all again.

    With several loaders, a batch counts as many samples as the part of its first loader: the first that has
    one. A loader that begins again within an epoch has another order then.

    Attributes:
        loader: this rank's part of the loader, or of all of them.
        loaders: the same as a list.
        num_batches: how many batches the epoch has on this rank, including those of an earlier run.
        is_certain: whether that number is exact; otherwise it is an upper limit.
        limit: the Trainer's `limit_train_batches`.
        samples_per_batch: how many items of the index stream all ranks together use for a batch; of several
            loaders, one for each rank.
        replayed: the last batch that was read again to continue from where an earlier run stopped; or None.
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
        self.limit = limit
        self._shards, self._combination = shards, combination
        self.loaders = [shard.loader for shard in shards]
        self._are_certain = [shard.is_certain for shard in shards]
        self.is_certain = all(self._are_certain)
        self.samples_per_batch = strategy.distributed_sampler_kwargs["num_replicas"]
        self._is_split = self._skips = False
        self.replayed: Any = None
        self._taken: deque[Row] = deque()
        if combination is None:
            self.loader: Any = self.loaders[0]
            self.samples_per_batch *= _batch_size_of_samples(self.loader)
            self._is_split = shards[0].sampler is not None
            self._skips = shards[0].stream is not None and not self._is_split
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
        self.num_batches = limited(length, self.limit)

    @property
    def lengths(self) -> tuple[float, ...]:
        """Of several loaders, how many batches each has on this rank; `inf` for unknown."""
        if self._combination is None:
            return ()
        both = zip(self._lengths, self._are_certain, strict=True)
        return tuple(length if is_certain else math.inf for length, is_certain in both)

    def place(self, progress: Progress) -> None:
        """Make the next `start` begin at the position of `progress` in the current epoch.

        Raises:
            ConfigurationError: within an epoch of data that rankwise does not split by index, if its first
                batches were for another number of ranks; on every rank.
        """
        done, samples = progress.batches_done, progress.samples_done
        if not self._is_split and samples != done * self.samples_per_batch:
            raise _other_ranks_error(progress)
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
        if is_cycled and lengths[0] < max(lengths) and not _has_fixed_sizes(self.loaders[0]):
            return None

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
        return all(shard.is_here for shard in self._shards) and not math.isinf(self.num_batches)


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

"""Each rank's data loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader, IterableDataset

from rankwise.data import (
    BatchStream,
    ShardedSampler,
    batches_before_split,
    check_interleaved_by_batches,
    check_shardable,
    in_dataset_order,
    is_shardable,
    is_split,
    set_epoch_of,
    shard_for_evaluation,
    shard_for_prediction,
    shard_for_training,
    sharded_sampler_of,
    with_batch_stream,
)
from rankwise.data.random_state import isolated_random_state, mixed_seed
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer.state import Progress
    from rankwise.trainer.trainer import Trainer

__all__ = [
    "LoaderShard",
    "TrainDataShard",
    "as_list",
    "check_can_be_gathered",
    "check_loaders",
    "ended_early",
    "has_certain_length",
    "length_of",
    "limited",
    "share_for",
]

_SHARDERS: dict[str, Callable[..., Any]] = {
    "train": shard_for_training,
    "validate": shard_for_evaluation,
    "test": shard_for_evaluation,
    "predict": shard_for_prediction,
}


@final
@dataclass
class LoaderShard:
    """One rank's batches of a loader.

    Attributes:
        loader: this rank's part of it.
        num_batches: how many of its batches are run; `inf` where nobody knows.
        is_certain: whether that number is known; where it is not, it is the most that are run.
    """

    loader: Iterable[Any]
    num_batches: float
    is_certain: bool = True

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield each batch, and whether it is the last."""
        if self.num_batches == 0:
            return
        batches = islice(self.loader, None if math.isinf(self.num_batches) else int(self.num_batches))
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)  # one ahead, to know which is the last
            yield batch, following is _END
            batch = following

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and iterable data, which shuffle differently in each epoch."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        dataset = getattr(self.loader, "dataset", None)
        iterable = dataset if isinstance(dataset, IterableDataset) else None
        set_epoch_of(epoch, batch_sampler, getattr(self.loader, "sampler", None), iterable)


_END = object()


def as_list(loaders: Any) -> list[Any]:
    """Return several loaders as they are given, or the one as a list of one."""
    is_several = isinstance(loaders, (list, tuple)) and all(isinstance(item, DataLoader) for item in loaders)
    return list(loaders) if is_several else [loaders]


def check_loaders(trainer: Trainer, phase: str, loaders: Any) -> None:
    """Make sure, before anything starts, that the loaders of a phase can be split over the ranks.

    Raises:
        UnshardableLoaderError: when one cannot.
    """
    if loaders is not None and trainer.use_distributed_sampler and trainer.world_size > 1:
        for loader in as_list(loaders):
            check_shardable(loader, by_index=phase == "predict")


def share_for(trainer: Trainer, phase: str, loader: Any, seed: int) -> LoaderShard:
    """Return this rank's batches of `loader` in a phase: `train`, `validate`, `test` or `predict`.

    Raises:
        UnshardableLoaderError: when the loader cannot be split over the ranks.
        ConfigurationError: for a fraction of a loader without length.
    """
    limit = trainer.limits[phase]
    place = trainer.strategy.distributed_sampler_kwargs
    if trainer.use_distributed_sampler and phase == "predict":
        loader = in_dataset_order(loader)
    is_dealt_out = trainer.use_distributed_sampler and (
        trainer.world_size > 1 or _is_ours_alone(phase, loader)
    )
    options: dict[str, Any] = (
        {"uneven": "keep"} if phase == "train" and trainer.uneven_inputs == "join" else {}
    )
    share = _SHARDERS[phase](loader, **place, seed=seed, **options) if is_dealt_out else loader
    if not is_dealt_out or phase != "predict":
        return LoaderShard(share, limited(length_of(share), limit), has_certain_length(share))
    # Predictions are dealt out by batches, so that the limit is one of the whole loader, whoever does that.
    whole = limited(length_of(batches_before_split(loader)), limit)
    own = whole if math.isinf(whole) else len(range(place["rank"], int(whole), place["num_replicas"]))
    return LoaderShard(share, own)


def _is_ours_alone(phase: str, loader: Any) -> bool:
    """Whether one rank has a loader dealt out like several: its part is checked, if the user has split it.

    It draws its training data like they do, so that another number of ranks can go on from it.
    """
    if not is_shardable(loader):
        return False
    return is_split(loader) or (phase == "train" and not math.isinf(length_of(loader)))


def check_can_be_gathered(trainer: Trainer, shares: list[LoaderShard]) -> None:
    """Make sure that predictions can be put in order, also where the user splits.

    Raises:
        UnshardableLoaderError: when a loader is known to be split by samples.
    """
    for loader in (share.loader for share in shares if trainer.world_size > 1):
        if isinstance(loader, DataLoader) and is_shardable(loader):
            check_interleaved_by_batches(loader)


def length_of(loader: Any) -> float:
    """Return how many batches a loader has; `inf` where nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # what iterable data sets and generators raise
        return math.inf


def has_certain_length(loader: Any) -> bool:
    """Return whether a loader's length is what comes; of iterable data it is but a claim."""
    is_iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return not is_iterable and not math.isinf(length_of(loader))


def limited(length: float, limit: float) -> float:
    """Return how many of `length` batches a limit, a number or a fraction, leaves.

    Raises:
        ConfigurationError: for a fraction of a loader without length.
    """
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


_END = object()


@final
class TrainDataShard:
    """This rank's batches of an epoch, from the first or from where an earlier run has stopped.

    What the batches are depends on the seed (of a user's generator, where there is one) and the epoch alone,
    not on what else draws random numbers; so do the numbers that a loader's workers draw. An iterable data
    set, which has no indices, is replayed.

    Args:
        trainer: knows the limits and this rank's place.
        share: this rank's part of the loader.
        seed: of the training run.

    Attributes:
        num_batches: how many batches the epoch has on this rank, those of an earlier run included.
        is_certain: whether that number is known; where it is not, it is the most that are run.
        samples_per_batch: how many items of the stream of indices all ranks together take for a batch.
    """

    def __init__(self, trainer: Trainer, share: LoaderShard, seed: int) -> None:
        self._limit = trainer.limits["train"]
        self._seed, self._rank = seed, trainer.global_rank
        given: Any = share.loader
        generator = getattr(given, "generator", None)
        if generator is not None:
            self._seed = mixed_seed(seed, generator.initial_seed())
        self.loader: Any = with_batch_stream(given, seed=seed, rank=self._rank, worker_seed=self._seed)
        self._share = LoaderShard(self.loader, share.num_batches)
        self.num_batches = share.num_batches
        self.is_certain = has_certain_length(given)
        self.samples_per_batch = _samples_per_batch(self.loader, trainer)
        self._replayed = 0

    def place(self, progress: Progress) -> None:
        """Let the next start be where `progress` is within the current epoch."""
        done, self._replayed = progress.batches_done, 0
        self._share.set_epoch(progress.current_epoch)
        sampler, stream = sharded_sampler_of(self.loader), getattr(self.loader, "batch_sampler", None)
        if isinstance(stream, BatchStream):
            stream.first, stream.skipped = done, 0 if sampler is not None else done
        if sampler is not None:
            sampler.skip = progress.samples_done
        elif not isinstance(stream, BatchStream):
            self._replayed = done
        left = length_of(self.loader) + (0 if self._replayed else done)
        self.num_batches = limited(left, self._limit)

    def start(self, progress: Progress) -> Iterator[tuple[Any, bool]]:
        """Start the loader's workers, if it has any; return each batch, and whether it is the last.

        The random state of this process is as before afterwards, but for data sets that are replayed.
        """
        seed = mixed_seed(self._seed, progress.current_epoch, self._rank)
        generator = getattr(self.loader, "generator", None)
        with isolated_random_state(seed, *([] if generator is None else [generator])):
            batches = iter(self.loader)
        for _ in range(self._replayed):
            next(batches, None)
        left = self.num_batches - progress.batches_done
        return self._counted(batches, int(left)) if self._is_exact else _one_ahead(batches, left)

    @property
    def _is_exact(self) -> bool:
        """Whether batches are loaded in this process, and their number is known.

        Then none may be loaded ahead: what it draws belongs behind what the training step draws.
        """
        is_here = isinstance(self.loader, DataLoader) and self.loader.num_workers == 0
        return is_here and is_shardable(self.loader) and not math.isinf(self.num_batches)

    def _counted(self, batches: Iterator[Any], left: int) -> Iterator[tuple[Any, bool]]:
        for number in range(left):
            batch = next(batches, _END)
            if batch is _END:
                raise ended_early(self.num_batches, self.num_batches - left + number)
            yield batch, number + 1 == left


def ended_early(length: float, count: float) -> ConfigurationError:
    """Return the error for a loader that has fewer batches than it says."""
    return ConfigurationError(
        message=f"The training loader has a length of {length:g} batches, but it ended after {count:g}.",
        remedy="let __len__ of its sampler or batch sampler say how many there are.",
    )


def _one_ahead(batches: Iterator[Any], left: float) -> Iterator[tuple[Any, bool]]:
    if left <= 0:
        return
    following, count = next(batches, _END), 1
    while following is not _END:
        batch, following = following, next(batches, _END) if count < left else _END
        count += 1
        yield batch, following is _END


def _samples_per_batch(loader: Any, trainer: Trainer) -> int:
    replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    stream = getattr(loader, "batch_sampler", None)
    if not isinstance(stream, BatchStream) or not isinstance(stream.sampler, ShardedSampler):
        return replicas  # whole batches are dealt out, or nothing is
    return replicas * int(stream.batches.batch_size)

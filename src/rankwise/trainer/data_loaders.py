"""Each rank's part of the data loaders."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader, IterableDataset

from rankwise.data.batches import BatchStream, SizedBatches, sharded_sampler_of, with_batch_stream
from rankwise.data.sampler import ShardedSampler, length_of, set_epoch_of
from rankwise.data.sharding import (
    batches_before_split,
    check_interleaved_by_batches,
    check_shardable,
    in_dataset_order,
    is_in_dataset_order,
    is_shardable,
    is_split_for_one_rank,
    shard_for_evaluation,
    shard_for_prediction,
    shard_for_training,
)
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.process_group.collectives import ALONE
from rankwise.seed import isolated_random_state, mixed_seed
from rankwise.strategies.data_split import replica_of

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.state import Progress, StageName

PHASE_NAMES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}
_ONE_TO_TRAIN = "train with one, over a data set that reads several, such as torch.utils.data.ConcatDataset."
_SHARDERS: dict[str, Callable[..., Any]] = {
    "train": shard_for_training,
    "validate": shard_for_evaluation,
    "test": shard_for_evaluation,
    "predict": shard_for_prediction,
}


@final
@dataclass
class LoaderShard:
    """One rank's part of a loader, and how many of its batches run; `inf` if unknown."""

    loader: Iterable[Any]
    num_batches: float

    def __post_init__(self) -> None:
        self.sized = SizedBatches(self.loader)
        self.batch_indices: list[Any] | None = None  # of the batch whose size was taken last

    def __iter__(self) -> Iterator[Any]:
        return _first(self.num_batches, self.sized) if self.num_batches else iter(())

    def take_size(self) -> int | None:
        """Return the number of samples in the batch that follows the last one asked for; None if unknown."""
        self.batch_indices = self.sized.indices.popleft()
        return self.sized.sizes.popleft()

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of samplers and iterable data sets, which then shuffle differently."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        dataset = getattr(self.loader, "dataset", None)
        iterable = dataset if isinstance(dataset, IterableDataset) else None
        set_epoch_of(epoch, batch_sampler, getattr(self.loader, "sampler", None), iterable)


def _first(count: float, batches: Iterable[Any]) -> Iterator[Any]:
    return islice(batches, None if math.isinf(count) else max(0, int(count)))


def as_list(given: Any) -> list[Any]:
    """Return the loaders that a user gave: a list of them, one alone (or a list of batches), or None.

    Raises:
        ConfigurationError: for a dictionary of loaders.
        InvalidTypeError: for what cannot be iterated over.
    """
    is_list = isinstance(given, (list, tuple))
    is_several = is_list and (not given or any(isinstance(item, DataLoader) for item in given))
    loaders = [] if given is None else list(given) if is_several else [given]
    for loader in loaders:
        if isinstance(loader, Mapping):
            raise ConfigurationError(
                message=f"A dictionary of loaders is not supported: its keys are {list(loader)}.",
                remedy=f"evaluate with a list of its values; {_ONE_TO_TRAIN}",
            )
        if not isinstance(loader, Iterable) and not callable(getattr(loader, "__getitem__", None)):
            expected = "a DataLoader, an iterable over batches, or a list of DataLoaders"
            is_datamodule = callable(getattr(loader, "train_dataloader", None))
            remedy = "derive it from rankwise.DataModule" if is_datamodule else ""
            raise InvalidTypeError(argument="dataloaders", value=loader, expected=expected, remedy=remedy)
    return loaders


def check_number(stage: StageName, phase: str, loaders: list[Any]) -> None:
    """Raise ConfigurationError unless there is one loader to train with, or any to evaluate."""
    is_train = phase == "train"
    if len(loaders) != 1 if is_train else not loaders and stage == phase:
        raise ConfigurationError(
            message=f"{stage}() has {len(loaders)} {PHASE_NAMES[phase]} loaders.",
            remedy=_ONE_TO_TRAIN if is_train else "pass one, or a list of them.",
        )


def check_loaders(stage: StageName, phase: str, given: Any, options: TrainerOptions, world_size: int) -> None:
    """Check, before any process starts, the number of loaders and that the ranks can split them."""
    if given is None:
        return
    loaders = as_list(given)
    check_number(stage, phase, loaders)
    for loader in loaders if options.use_distributed_sampler and world_size > 1 else ():
        check_shardable(loader, by_index=phase == "predict")


def shard_for_phase(
    phase: str, loader: Any, seed: int, options: TrainerOptions, strategy: Strategy
) -> LoaderShard:
    """Return this rank's batches of `loader` in a phase: `train`, `validate`, `test` or `predict`."""
    limit = options.limit(phase)
    replica = replica_of(strategy)
    if options.overfit_batches and phase in ("train", "validate"):
        loader = _without_shuffling(loader, phase, strategy)
    if options.use_distributed_sampler and phase == "predict":
        loader = in_dataset_order(loader)
    if strategy.job_group is ALONE and getattr(getattr(loader, "dataset", None), "shards_itself", False):
        loader = shard_for_evaluation(loader, 1, 0)  # in each phase: else it reads its part of an outer job
    is_split_here = options.use_distributed_sampler and (
        strategy.world_size > 1 or is_split_for_one_rank(loader, keeps_order=phase != "train")
    )
    keeps_uneven = phase == "train" and options.uneven_inputs == "join"
    uneven: dict[str, Any] = {"uneven": "keep"} if keeps_uneven else {}
    shard = _SHARDERS[phase](loader, **replica, seed=seed, **uneven) if is_split_here else loader
    if not is_split_here or phase != "predict":
        return LoaderShard(shard, limited(length_of(shard), limit))
    # Prediction splits by batches, so the limit applies to the whole loader, also if the user has split it.
    whole = limited(length_of(batches_before_split(loader)), limit)
    own = whole if math.isinf(whole) else len(range(replica["rank"], int(whole), replica["num_replicas"]))
    return LoaderShard(shard, own)


def _without_shuffling(loader: Any, phase: str, strategy: Strategy) -> Any:
    """Return a loader that has the same batches in every epoch; warn on rank 0 of what that changes."""
    ordered = in_dataset_order(loader)
    sampler = getattr(ordered, "sampler", None)
    problem = ""
    if ordered is not loader:
        problem = f"overfit_batches reads the {PHASE_NAMES[phase]} data in their order, without shuffling."
    elif is_shardable(loader) and not is_in_dataset_order(loader):
        problem = (
            f"overfit_batches keeps {type(sampler).__name__} of the {PHASE_NAMES[phase]} loader: the batches "
            "of two epochs may differ."
        )
    if problem and strategy.is_global_zero:
        warnings.warn(problem, stacklevel=2)
    return ordered


def check_limit(strategy: Strategy, phase: str, shards: list[LoaderShard], options: TrainerOptions) -> None:
    """Raise ConfigurationError if a fraction leaves no batch of a loader. Collective if there is one."""
    limit = options.limit(phase)
    if phase == "train" or isinstance(limit, int) or limit in (0.0, 1.0):
        return
    own = [(length_of(shard.loader), shard.num_batches) for shard in shards]
    for number, by_rank in enumerate(zip(*strategy.all_gather_object(own), strict=True)):
        lengths, counts = zip(*by_rank, strict=True)
        if any(lengths) and not any(counts):
            raise ConfigurationError(
                message=f"A limit of {limit} leaves no batch of {PHASE_NAMES[phase]} loader {number}.",
                facts=f"the ranks' parts of it have {list(lengths)} batches.",
                remedy="a larger fraction, or a number of batches (int); 0 for none.",
            )


def check_can_be_gathered(shards: list[LoaderShard], world_size: int) -> None:
    """Make sure that the ranks' predictions can be put in dataset order, also if the user splits the data."""
    for loader in (shard.loader for shard in shards if world_size > 1):
        if isinstance(loader, DataLoader) and is_shardable(loader):
            check_interleaved_by_batches(loader)


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
class TrainDataShard:
    """This rank's batches of an epoch, from its first batch or from where an earlier run stopped.

    The batches, and what a loader's workers draw, depend only on the seed (of the user's generator, if there
    is one) and the epoch. To continue within an iterable data set, its batches are read again.

    Attributes:
        num_batches: how many batches the epoch has on this rank, including those of an earlier run.
        is_certain: whether that number is exact; otherwise it is an upper limit.
        limit: the Trainer's `limit_train_batches`.
        samples_per_batch: how many items of the index stream all ranks together use for a batch.
        replayed: the last batch that was read again to continue from where an earlier run stopped; or None.
    """

    replayed: Any = None

    def __init__(self, shard: LoaderShard, seed: int, limit: float, strategy: Strategy) -> None:
        self.limit = limit
        self._seed, self._rank = seed, strategy.global_rank
        given: Any = shard.loader
        generator = getattr(given, "generator", None)
        if generator is not None:
            self._seed = mixed_seed(seed, generator.initial_seed())
        self.loader: Any = with_batch_stream(given, seed=seed, rank=self._rank, worker_seed=self._seed)
        self._shard = LoaderShard(self.loader, shard.num_batches)
        self.num_batches = shard.num_batches
        is_iterable = isinstance(given, DataLoader) and isinstance(given.dataset, IterableDataset)
        self.is_certain = not is_iterable and not math.isinf(length_of(given))
        replicas = strategy.distributed_sampler_kwargs["num_replicas"]
        self.samples_per_batch = replicas * _batch_size_of_samples(self.loader)
        self._replayed = 0
        self.take_size = self._shard.take_size

    def place(self, progress: Progress) -> None:
        """Make the next `start` begin at the position of `progress` in the current epoch.

        Raises:
            ConfigurationError: within an epoch of data that rankwise does not split by index, if its first
                batches were for another number of ranks; on every rank.
        """
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
        """Start the loader's workers, if it has any; return the batches that are left."""
        seed = mixed_seed(self._seed, progress.current_epoch, self._rank)
        generator = getattr(self.loader, "generator", None)
        with isolated_random_state(seed, *([] if generator is None else [generator])):
            batches = iter(self._shard.sized)
        self.replayed = None
        for batch in islice(batches, self._replayed):  # there may be fewer now
            self.replayed = batch
        self._shard.sized.sizes.clear()
        return _first(self.num_batches - progress.batches_done, batches)

    @property
    def is_exact(self) -> bool:
        """Whether batches are loaded in this process, and their number is known.

        Then none may be loaded ahead: its random numbers must come after those of the training step.
        """
        is_here = is_shardable(self.loader) and self.loader.num_workers == 0
        return is_here and not math.isinf(self.num_batches)


def _other_ranks_error(progress: Progress) -> ConfigurationError:
    done = progress.batches_done
    ranks = progress.samples_done / done
    return ConfigurationError(
        message="Training cannot continue within an epoch on another number of ranks: rankwise does not "
        "split these data by index, so nothing tells which samples are left.",
        facts=f"{done} batches of epoch {progress.current_epoch} are done, on {ranks:g} ranks.",
        remedy=f"continue on {ranks:g} ranks, or from a checkpoint written at the end of an epoch.",
    )


def _batch_size_of_samples(loader: Any) -> int:
    """Return how many items of the index stream are in a batch; 1 if whole batches are distributed."""
    stream = getattr(loader, "batch_sampler", None)
    if isinstance(stream, BatchStream) and isinstance(stream.sampler, ShardedSampler):
        return int(stream.batches.batch_size)
    return 1

"""Each rank's part of the data loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader, IterableDataset

from rankwise.data.batches import (
    BatchStream,
    DescribedBatch,
    SizedBatches,
    set_epoch_of_loader,
    sharded_sampler_of,
    start_with_seed,
    with_batch_stream,
)
from rankwise.data.combined_loader import CombinedLoader, check_iterable, is_collection
from rankwise.data.sampler import ShardedSampler, length_of
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
    with_attributes,
)
from rankwise.errors import ConfigurationError
from rankwise.process_group.collectives import ALONE
from rankwise.ranks import warn
from rankwise.strategies.agreement import replica_of

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.state import LoopContext, StageName

PHASE_NAMES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}
_SHARDERS: dict[str, Callable[..., Any]] = {
    "train": shard_for_training,
    "validate": shard_for_evaluation,
    "test": shard_for_evaluation,
    "predict": shard_for_prediction,
}


@final
class LoaderShard:
    """One rank's part of a loader, and how many of its batches run; `inf` if unknown.

    In training, the order of the batches and what the loader's workers draw depend only on the seed (of the
    loader's own generator, if it has one), the epoch and the number of the pass.

    Attributes:
        loader: the part; in training its batches of indices, if it has any, come from a `BatchStream`.
        batch_indices: the indices of the batch whose size was taken last; None for unknown.
        stream: the batches of indices of training, if there are any.
        sampler: in training, rankwise's sampler that splits the loader over the ranks, if there is one.
    """

    def __init__(self, loader: Any, num_batches: float) -> None:
        self.loader = loader
        self.num_batches = num_batches
        self.batch_indices: list[Any] | None = None
        self.stream: BatchStream | None = None
        self.sampler: ShardedSampler | None = None
        self._seed = self._epoch = 0
        self._variant: tuple[int, ...] = ()
        self._number = self._rank = 0
        self._length = math.inf

    @cached_property
    def _sized(self) -> SizedBatches:
        return SizedBatches(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return first_of(self.num_batches, self._sized) if self.num_batches else iter(())

    def take_size(self) -> int | None:
        """Return the number of samples in the batch that follows the last one asked for; None if unknown."""
        self.batch_indices = self._sized.indices.popleft()
        return self._sized.sizes.popleft()

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
    def is_here(self) -> bool:
        """Whether batches are loaded in this process, by indices."""
        return is_shardable(self.loader) and self.loader.num_workers == 0

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
        """Begin the next pass over the data of an epoch after its first batches.

        These are counted as `samples` of all ranks where rankwise splits the data and there are any. A later
        pass has another order.
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
        return start_with_seed(self.loader, self._sized.described, *seed)


def first_of(count: float, batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over the first `count` batches."""
    return islice(batches, None if math.isinf(count) else max(0, int(count)))


def loaders_in(given: Any) -> list[Any]:
    """Return the loaders that a user gave: several in containers, one alone (or a list of batches), or None.

    Raises:
        InvalidTypeError: for a value that cannot be iterated over.
    """
    if given is None or isinstance(given, DataLoader):
        return [] if given is None else [given]
    if isinstance(given, CombinedLoader):
        return given.flattened
    if is_collection(given):
        return CombinedLoader(given).flattened
    check_iterable(given)
    return [given]


def combination_of(given: Any) -> CombinedLoader | None:
    """Return how to combine the loaders of training; None for one alone."""
    if isinstance(given, (DataLoader, CombinedLoader)):
        return given if isinstance(given, CombinedLoader) else None
    return CombinedLoader(given, "max_size_cycle") if is_collection(given) else None


def restored_loaders(given: Any, shards: list[LoaderShard]) -> Any:
    """Return the parts of the loaders that a user gave, in the user's containers, without their workers."""
    loaders = [
        with_attributes(shard.loader) if isinstance(shard.loader, DataLoader) else shard.loader
        for shard in shards
    ]
    combination = combination_of(given)
    if combination is None:
        return loaders[0] if loaders else None
    return combination.restored(loaders)


def check_num_loaders(stage: StageName, phase: str, loaders: list[Any]) -> None:
    """Raise ConfigurationError unless there is a loader to train with, or any to evaluate."""
    if not loaders and (phase == "train" or stage == phase):
        raise ConfigurationError(
            message=f"{stage}() has 0 {PHASE_NAMES[phase]} loaders.",
            remedy="pass one, or several." if phase == "train" else "pass one, or a list of them.",
        )


def check_mode(phase: str, given: Any, options: TrainerOptions) -> None:
    """Raise ConfigurationError for a way of combining loaders that a phase does not have."""
    mode = given.mode if isinstance(given, CombinedLoader) else None
    if phase != "train" and mode not in (None, "sequential"):
        raise ConfigurationError(
            message=f"CombinedLoader(mode={mode!r}) is for training, not for {PHASE_NAMES[phase]}.",
            facts="an evaluation reads each loader to its end, so that each sample counts once.",
            remedy='CombinedLoader(..., "sequential"), or a list of the loaders.',
        )
    if phase == "train" and mode == "sequential":
        raise ConfigurationError(
            message="CombinedLoader(mode='sequential') is for evaluation, not for training.",
            remedy='another mode, such as "max_size_cycle"; or one loader over a '
            "torch.utils.data.ConcatDataset.",
        )
    if phase == "train" and combination_of(given) is not None and options.uneven_inputs == "join":
        raise ConfigurationError(
            message="uneven_inputs='join' needs one training loader.",
            facts="a rank would lack batches of some loaders only, and weights could not make up for that.",
            remedy='uneven_inputs="error", which shards loaders evenly; or one loader over a data set that '
            "reads several.",
        )


def check_loaders(stage: StageName, phase: str, given: Any, options: TrainerOptions, world_size: int) -> None:
    """Check, before any process starts, the number of loaders and that the ranks can split them."""
    if given is None:
        return
    check_mode(phase, given, options)
    loaders = loaders_in(given)
    check_num_loaders(stage, phase, loaders)
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
        warn(problem)
    return ordered


def check_fraction(
    strategy: Strategy, phase: str, shards: list[LoaderShard], options: TrainerOptions
) -> None:
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


def warn_if_empty(strategy: Strategy, phase: str, loaders: list[Any]) -> None:
    """Warn on rank 0 of a loader without a batch, as Lightning does; it trains or evaluates nothing.

    One of several for training is an error later.
    """
    is_refused = phase == "train" and len(loaders) > 1
    if strategy.is_global_zero and not is_refused and any(length_of(loader) == 0 for loader in loaders):
        warn(f"The {PHASE_NAMES[phase]} loader is empty: its length is 0.")


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


def must_reload(context: LoopContext, phase: str) -> bool:
    """Return whether the loaders of a phase are from before a multiple of the epochs of reloading."""
    every, loaded = context.options.reload_dataloaders_every_n_epochs, context.stage.loaded_epochs
    epoch = context.state.progress.current_epoch
    return bool(every) and loaded.get(phase, epoch) // every != epoch // every

"""The data of a stage: where its loaders come from, this rank's part of each, and batches for the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader

from rankwise.checks import check_callable, check_is_a, lightning_base
from rankwise.data import sharding
from rankwise.data.combined_loader import CombinedLoader, check_iterable, is_collection
from rankwise.data.sampler import length_of
from rankwise.errors import ConfigurationError
from rankwise.process_group.collectives import ALONE
from rankwise.ranks import warn
from rankwise.seed import isolated_random_state, mixed_seed
from rankwise.strategies.agreement import agree_on_loaders, replica_of
from rankwise.trainer.data.data_module import TRANSFER_HOOKS, DataModule, is_own, undefined
from rankwise.trainer.data.loader_shard import LoaderShard, TrainData, limited
from rankwise.trainer.module import TrainingModule, is_defined

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.state import LoopContext, StageName

PHASE_NAMES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}
_SHARDERS = {"train": sharding.shard_for_training, "predict": sharding.shard_for_prediction}
_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@final
class StageLoaders:
    """The loaders of a stage, by phase: arguments, or else the data module's, or else the module's own.

    `given` has the arguments, None where there is none; a data module in place of the first is `datamodule`.
    """

    def __init__(self, stage: StageName, given: dict[str, Any], datamodule: DataModule | None = None) -> None:
        first = next(iter(given))
        if _is_data_module(given[first]) and datamodule is None:
            datamodule, given = given[first], {**given, first: None}
        if datamodule is not None and not _is_data_module(datamodule):
            check_is_a("datamodule", datamodule, (DataModule, type(None)), "a DataModule")
        if datamodule is not None and any(each is not None for each in given.values()):
            raise ConfigurationError(
                message=f"{stage}() was given loaders and a data module, which has loaders too.",
                remedy="pass one of them.",
            )
        self.stage, self.given, self.datamodule = stage, given, datamodule

    def check(self, module: TrainingModule) -> None:
        """Raise ConfigurationError unless there is a loader for the stage; warn of methods without effect."""
        has_loader = {phase: self.has(module, phase) for phase in self.given}
        phase = "train" if self.stage == "fit" else self.stage
        if not has_loader[phase]:
            raise undefined(self._source(module), _HOOKS[phase])
        if self.datamodule is not None:
            _warn_of_hidden(module, self.datamodule, [_HOOKS[phase] for phase in self.given])
        if loaders_in(self.given.get("validate")) and not is_defined(module, "validation_step"):
            raise undefined(module, "validation_step")  # of fit: its loaders would be ignored

    def has(self, module: TrainingModule, phase: str) -> bool:
        """Return whether there are loaders for a phase: arguments, or a method that returns them."""
        hook, owner = _HOOKS[phase], self._source(module)
        base = TrainingModule if self.datamodule is None else DataModule
        if self.given[phase] is not None or not is_own(owner, base, hook):
            return self.given[phase] is not None
        name, expected = f"{type(owner).__name__}.{hook}", "a method that returns loaders, or None"
        check_callable(name, getattr(owner, hook), expected)
        return True

    def _source(self, module: TrainingModule) -> Any:
        """Return what has the methods that return loaders: the data module, or else the module."""
        return module if self.datamodule is None else self.datamodule  # either may have a length of 0

    def train_data(self, context: LoopContext, order_seed: int | None = None) -> TrainData:
        """Return this rank's training batches; `order_seed` is that of a run that continues. Collective."""
        given = self._made(context, "train")
        if context.options.reload_dataloaders_every_n_epochs and self.given["train"] is None:
            order_seed = None  # loaders that are made again have their own
        shards = self._shards(context, "train", given, order_seed)
        limit, combination = context.options.limit("train"), _combination_of(given)
        data = TrainData(shards, context.state.seed, limit, context.strategy, combination)
        context.state.num_batches["train"] = [data.num_batches]
        return data

    def evaluation_shards(self, context: LoopContext, phase: str) -> list[LoaderShard]:
        """Return this rank's part of each loader of a phase other than training. Collective."""
        return self._shards(context, phase, self._made(context, phase))

    def _made(self, context: LoopContext, phase: str) -> Any:
        """Return the loaders of a phase as given; a fit reloads them with random numbers of the epoch.

        A run that resumes in that epoch makes the same ones.
        """
        epoch, every = context.state.progress.current_epoch, context.options.reload_dataloaders_every_n_epochs
        context.stage.loaded_epochs[phase] = epoch
        if self.given[phase] is not None:
            return self.given[phase]
        make = getattr(self._source(context.module), _HOOKS[phase])
        if self.stage != "fit" or not every:
            return make()
        with isolated_random_state(mixed_seed(context.state.seed, epoch // every)):
            return make()

    def _shards(
        self, context: LoopContext, phase: str, given: Any, order_seed: int | None = None
    ) -> list[LoaderShard]:
        """Return this rank's part of each loader of a phase; `order_seed` replaces the seed of training."""
        state, strategy = context.state, context.strategy
        _check_mode(phase, given, context.options)
        loaders = loaders_in(given)
        seeds = agree_on_loaders(
            strategy,
            PHASE_NAMES[phase],
            loaders,
            default=state.seed,
            is_split_here=context.options.use_distributed_sampler,
        )
        _check_num_loaders(self.stage, phase, loaders)
        if phase == "train":
            agreed = seeds[0] if len(set(seeds)) == 1 else mixed_seed(*seeds)
            state.order_seed = agreed if order_seed is None else order_seed
            seeds = [state.order_seed] * len(seeds)
        shards = [
            shard_for_phase(phase, loader, seed, context.options, strategy)
            for loader, seed in zip(loaders, seeds, strict=True)
        ]
        _check_fraction(strategy, phase, shards, context.options.limit(phase))
        _warn_if_empty(strategy, phase, given)
        state.num_batches[phase] = [shard.num_batches for shard in shards]
        context.stage.shards[phase] = shards
        context.stage.loaders[phase] = _restored_loaders(given, shards)
        return shards


def _is_data_module(value: object) -> bool:
    return isinstance(value, DataModule) or lightning_base(type(value), "LightningDataModule") is not None


def _warn_of_hidden(module: TrainingModule, datamodule: DataModule, loaders: list[str]) -> None:
    """Warn of a module's methods that are not called, as Lightning does not call them either."""
    names = [name for name in loaders if is_defined(module, name)]
    names += [
        name for name in TRANSFER_HOOKS if is_defined(module, name) and is_own(datamodule, DataModule, name)
    ]
    if names:
        warn(
            f"Of {type(module).__name__} these methods are not called, as there is a data module: "
            f"{', '.join(names)}. Keep them in {type(datamodule).__name__} only.",
        )


def loaders_in(given: Any) -> list[Any]:
    """Return the loaders that a user gave: several in containers, one (or a list of batches), or None."""
    if given is None or isinstance(given, DataLoader):
        return [] if given is None else [given]
    if (combination := _combination_of(given)) is not None:
        return combination.flattened
    check_iterable(given)
    return [given]


def _combination_of(given: Any) -> CombinedLoader | None:
    """Return how to combine the loaders of training; None for one alone."""
    if isinstance(given, (DataLoader, CombinedLoader)):
        return given if isinstance(given, CombinedLoader) else None
    return CombinedLoader(given, "max_size_cycle") if is_collection(given) else None


def _restored_loaders(given: Any, shards: list[LoaderShard]) -> Any:
    """Return the parts of the loaders that a user gave, in the user's containers, without their workers."""
    parts = (shard.loader for shard in shards)
    loaders = [sharding.with_attributes(part) if isinstance(part, DataLoader) else part for part in parts]
    if (combination := _combination_of(given)) is not None:
        return combination.restored(loaders)
    return loaders[0] if loaders else None


def _check_num_loaders(stage: StageName, phase: str, loaders: list[Any]) -> None:
    """Raise ConfigurationError unless there is a loader to train with, or any to evaluate."""
    if not loaders and (phase == "train" or stage == phase):
        raise ConfigurationError(
            message=f"{stage}() has 0 {PHASE_NAMES[phase]} loaders.",
            remedy="pass one, or several." if phase == "train" else "pass one, or a list of them.",
        )


def _check_mode(phase: str, given: Any, options: TrainerOptions) -> None:
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
    if phase == "train" and _combination_of(given) is not None and options.uneven_inputs == "join":
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
    _check_mode(phase, given, options)
    loaders = loaders_in(given)
    _check_num_loaders(stage, phase, loaders)
    for loader in loaders if options.use_distributed_sampler and world_size > 1 else ():
        sharding.check_shardable(loader, by_index=phase == "predict")


def shard_for_phase(
    phase: str, loader: Any, seed: int, options: TrainerOptions, strategy: Strategy
) -> LoaderShard:
    """Return this rank's batches of `loader` in a phase: `train`, `validate`, `test` or `predict`."""
    limit = options.limit(phase)
    replica = replica_of(strategy)
    if options.overfit_batches and phase in ("train", "validate"):
        loader = _without_shuffling(loader, phase, strategy)
    if options.use_distributed_sampler and phase == "predict":
        loader = sharding.in_dataset_order(loader)
    if strategy.job_group is ALONE and getattr(getattr(loader, "dataset", None), "shards_itself", False):
        # In each phase: else it reads its part of an outer job.
        loader = sharding.shard_for_evaluation(loader, 1, 0)
    is_split_here = options.use_distributed_sampler and (
        strategy.world_size > 1 or sharding.is_split_for_one_rank(loader, keeps_order=phase != "train")
    )
    keeps_uneven = phase == "train" and options.uneven_inputs == "join"
    uneven: dict[str, Any] = {"uneven": "keep"} if keeps_uneven else {}
    split: Callable[..., Any] = _SHARDERS.get(phase, sharding.shard_for_evaluation)
    shard = split(loader, **replica, seed=seed, **uneven) if is_split_here else loader
    if not is_split_here or phase != "predict":
        return LoaderShard(shard, limited(length_of(shard), limit))
    # Prediction splits by batches, so the limit applies to the whole loader, also if the user has split it.
    whole = limited(length_of(sharding.batches_before_split(loader)), limit)
    own = whole if math.isinf(whole) else len(range(replica["rank"], int(whole), replica["num_replicas"]))
    return LoaderShard(shard, own)


def _without_shuffling(loader: Any, phase: str, strategy: Strategy) -> Any:
    """Return a loader that has the same batches in every epoch; warn on rank 0 of what that changes."""
    ordered, words = sharding.in_dataset_order(loader), PHASE_NAMES[phase]
    if not strategy.is_global_zero:
        return ordered
    if ordered is not loader:
        warn(f"overfit_batches reads the {words} data in their order, without shuffling.")
    elif sharding.is_shardable(loader) and not sharding.is_in_dataset_order(loader):
        kind = type(getattr(ordered, "sampler", None)).__name__
        warn(f"overfit_batches keeps {kind} of the {words} loader: the batches of two epochs may differ.")
    return ordered


def _check_fraction(strategy: Strategy, phase: str, shards: list[LoaderShard], limit: float) -> None:
    """Raise ConfigurationError if a fraction leaves no batch of a loader. Collective if there is one."""
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


def _warn_if_empty(strategy: Strategy, phase: str, given: Any) -> None:
    """Warn on rank 0 of a loader without a batch, as Lightning does; it trains or evaluates nothing."""
    combination = _combination_of(given) if phase == "train" else None
    are_empty = [length_of(loader) == 0 for loader in loaders_in(given)]
    # Beside a longer one, it is an error when it begins again.
    is_refused = combination is not None and combination.mode == "max_size_cycle" and not all(are_empty)
    if strategy.is_global_zero and any(are_empty) and not is_refused:
        warn(f"The {PHASE_NAMES[phase]} loader is empty: its length is 0.")


def check_can_be_gathered(shards: list[LoaderShard], world_size: int) -> None:
    """Make sure that the ranks' predictions can be put in dataset order, also if the user splits the data."""
    for loader in (shard.loader for shard in shards if world_size > 1):
        if isinstance(loader, DataLoader) and sharding.is_shardable(loader):
            sharding.check_interleaved_by_batches(loader)


def must_reload(context: LoopContext, phase: str) -> bool:
    """Return whether the loaders of a phase are from before a multiple of the epochs of reloading."""
    every, loaded = context.options.reload_dataloaders_every_n_epochs, context.stage.loaded_epochs
    epoch = context.state.progress.current_epoch
    return bool(every) and loaded.get(phase, epoch) // every != epoch // every


@final
class BatchTransfer:
    """Move batches to this rank's device; which hooks module and data module define is decided once."""

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._before, self._transfer, self._after = (_own(context, name) for name in TRANSFER_HOOKS)
        self._has_hooks = any((self._before, self._transfer, self._after))

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return the batch for the step; as in Lightning, hooks get it in the precision's format."""
        strategy = self._strategy
        if not self._has_hooks:
            return strategy.precision.convert_input(strategy.batch_to_device(batch))
        batch = strategy.precision.convert_input(batch)
        if self._before is not None:
            batch = self._before(batch, dataloader_idx)
        if self._transfer is None:
            batch = strategy.batch_to_device(batch)
        else:
            batch = self._transfer(batch, strategy.root_device, dataloader_idx)
        return batch if self._after is None else self._after(batch, dataloader_idx)


def _own(context: LoopContext, name: str) -> Callable[..., Any] | None:
    """Return the method that defines a hook: the data module's of this stage, or else the module's."""
    datamodule = context.stage.datamodule
    if datamodule is not None and is_own(datamodule, DataModule, name):
        found: Callable[..., Any] = getattr(datamodule, name)
        return found
    return context.hooks.own(name)

"""The loaders of a stage: where they come from, and this rank's part of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader

from rankwise.checks import check_is_a, lightning_base
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.ranks import warn
from rankwise.seed import isolated_random_state, mixed_seed
from rankwise.strategies.agreement import agree_on_loaders
from rankwise.trainer.data.data_hooks import TRANSFER_HOOKS, is_own, undefined
from rankwise.trainer.data.data_module import DataModule
from rankwise.trainer.data.loader_shard import (
    PHASE_NAMES,
    LoaderShard,
    check_fraction,
    check_mode,
    check_num_loaders,
    combination_of,
    loaders_in,
    restored_loaders,
    shard_for_phase,
    warn_if_empty,
)
from rankwise.trainer.data.train_data import TrainData
from rankwise.trainer.module import TrainingModule, is_defined

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext, StageName

_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@final
class StageLoaders:
    """The loaders of a stage, by phase: arguments, or else the data module's, or else the module's own.

    Attributes:
        stage: the name of the stage.
        given: the arguments by phase; None where there is none. A data module in place of the first becomes
            `datamodule`.
        datamodule: the data module of this stage, or None.
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
        """Raise ConfigurationError unless there is a loader for the stage.

        Warn of methods of the module that are not called, because there is a data module.
        """
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
        name, method = f"{type(owner).__name__}.{hook}", getattr(owner, hook)
        if not callable(method):
            expected = "a method that returns loaders, or None"
            raise InvalidTypeError(argument=name, value=method, expected=expected)
        return True

    def _source(self, module: TrainingModule) -> Any:
        """Return what has the methods that return loaders: the data module, or else the module."""
        return module if self.datamodule is None else self.datamodule  # either may have a length of 0

    def train_data(self, context: LoopContext, order_seed: int | None = None) -> TrainData:
        """Return this rank's batches of training. Collective.

        `order_seed` is that of a run that continues.
        """
        given = self._made(context, "train")
        if context.options.reload_dataloaders_every_n_epochs and self.given["train"] is None:
            order_seed = None  # loaders that are made again have their own
        shards = self._shards(context, "train", given, order_seed)
        limit, combination = context.options.limit("train"), combination_of(given)
        data = TrainData(shards, context.state.seed, limit, context.strategy, combination)
        context.state.num_batches["train"] = [data.num_batches]
        return data

    def evaluation_shards(self, context: LoopContext, phase: str) -> list[LoaderShard]:
        """Return this rank's part of each loader of a phase other than training. Collective."""
        return self._shards(context, phase, self._made(context, phase))

    def _made(self, context: LoopContext, phase: str) -> Any:
        """Return the loaders of a phase as the user has given them.

        Loaders that a fit reloads are made with random numbers of their epoch, also in a run that resumes
        there.
        """
        given, owner = self.given[phase], self._source(context.module)
        epoch, every = context.state.progress.current_epoch, context.options.reload_dataloaders_every_n_epochs
        context.stage.loaded_epochs[phase] = epoch
        if given is not None or self.stage != "fit" or not every:
            return getattr(owner, _HOOKS[phase])() if given is None else given
        with isolated_random_state(mixed_seed(context.state.seed, epoch // every)):
            return getattr(owner, _HOOKS[phase])()

    def _shards(
        self, context: LoopContext, phase: str, given: Any, order_seed: int | None = None
    ) -> list[LoaderShard]:
        """Return this rank's part of each loader of a phase; `order_seed` replaces the seed of training."""
        state, strategy = context.state, context.strategy
        check_mode(phase, given, context.options)
        loaders = loaders_in(given)
        seeds = agree_on_loaders(
            strategy,
            PHASE_NAMES[phase],
            loaders,
            default=state.seed,
            is_split_here=context.options.use_distributed_sampler,
        )
        check_num_loaders(self.stage, phase, loaders)
        if phase == "train":
            agreed = seeds[0] if len(set(seeds)) == 1 else mixed_seed(*seeds)
            state.order_seed = agreed if order_seed is None else order_seed
            seeds = [state.order_seed] * len(seeds)
        shards = [
            shard_for_phase(phase, loader, seed, context.options, strategy)
            for loader, seed in zip(loaders, seeds, strict=True)
        ]
        check_fraction(strategy, phase, shards, context.options)
        warn_if_empty(strategy, phase, loaders)
        state.num_batches[phase] = [shard.num_batches for shard in shards]
        context.stage.shards[phase] = shards
        context.stage.loaders[phase] = restored_loaders(given, shards)
        return shards


def _is_data_module(value: object) -> bool:
    if value is None or isinstance(value, DataLoader):
        return False
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

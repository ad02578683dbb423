"""A stage: a Trainer's fit, validate, test or predict on each rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import DataLoader

from rankwise.checks import check_is_a, lightning_base
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.loggers.base import finalize_all
from rankwise.monitoring.heartbeat import TEARDOWN, report_phase
from rankwise.processes.fork_safety import import_dynamo
from rankwise.processes.signals import StoppedBySignal, as_raised
from rankwise.seed import (
    drawn_seed,
    get_random_state,
    given_seed,
    isolated_random_state,
    mixed_seed,
    seed_process,
    set_random_state,
)
from rankwise.strategies.agreement import check_ranks_agree, fingerprint_of, share_model, share_states
from rankwise.strategies.collectives import errors_shared
from rankwise.strategies.data_split import agree_on_loaders
from rankwise.trainer.checkpointing import (
    CheckpointFiles,
    check_contents,
    note_trained,
    restore_module,
    restore_training,
)
from rankwise.trainer.consistency import fingerprint_of_checkpoint
from rankwise.trainer.data import DataModule
from rankwise.trainer.data.data_hooks import TRANSFER_HOOKS, DataHooks, is_own, prepares_data, undefined
from rankwise.trainer.data.train_data import TrainData
from rankwise.trainer.data_loaders import (
    PHASE_NAMES,
    LoaderShard,
    check_can_be_gathered,
    check_fraction,
    check_mode,
    check_num_loaders,
    combination_of,
    loaders_in,
    restored_loaders,
    shard_for_phase,
    warn_if_empty,
)
from rankwise.trainer.hooks import errors_logged
from rankwise.trainer.loops.bucket_order import replay_gradient_order
from rankwise.trainer.loops.evaluation import EvaluationLoop, Gather
from rankwise.trainer.loops.fit import FitLoop, end_epoch
from rankwise.trainer.loops.validation import run_sanity_check
from rankwise.trainer.module import TrainingModule, is_defined
from rankwise.trainer.state import TrainerStatus
from rankwise.trainer.state_transfer import RankState, part_streams

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.state import LoopContext, StageName

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@contextmanager
def _torch_flags(options: TrainerOptions) -> Iterator[None]:
    """Set torch's flags as `deterministic`, `benchmark` and `detect_anomaly` say, for the block.

    Mutates: torch's flags and, with `deterministic`, cuBLAS's environment variable; both until the end.
    """
    deterministic, benchmark = options.deterministic, options.benchmark
    with ExitStack() as stack:
        if options.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        if deterministic:
            was_on = torch.are_deterministic_algorithms_enabled()
            was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, was_on, warn_only=was_warning)
            torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
            if _CUBLAS not in os.environ:
                stack.callback(os.environ.pop, _CUBLAS, None)
                os.environ[_CUBLAS] = ":4096:8"  # without it cuBLAS is not deterministic
            benchmark = False if benchmark is None else benchmark  # which chooses by measuring
        if benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = benchmark
        yield


@contextmanager
def _profiled(context: LoopContext, stage: StageName) -> Iterator[None]:
    """Measure a stage, and the parts of it that are the strategy's; describe it if it succeeds."""
    profiler, strategy = context.profiler, context.strategy
    if not profiler.is_active:
        yield
        return
    methods = {
        method: method for method in ("backward", "optimizer_step", "batch_to_device", "save_checkpoint")
    }
    profiler.setup(stage, strategy.local_rank, context.hooks.trainer.log_dir)
    profiler.instrument(strategy, **methods, call_method="training_step")
    try:
        yield
    finally:
        for method in (*methods, "call_method"):
            delattr(strategy, method)
        profiler.teardown(stage)
    profiler.describe()


@final
@dataclass
class Stage:
    """A stage: its arguments, and its work on each rank.

    Attributes:
        loaders: the user's loaders by phase; None for the data module's, or else the module's own. A data
            module in place of the first becomes `datamodule`.
        gather: which ranks get the predictions.
        keeps_outputs: whether any rank gets them.
        seed: of this process; the trainer uses rank 0's, or the seed of the run that continues.
        stream: seed of the random numbers that are drawn in the stage; rank 0's counts.
        ckpt_path: a path, `"best"`, `"last"` or None; once found, a path or None.
        checkpoint: the checkpoint to load, or None.
    """

    name: StageName
    loaders: dict[str, Any]
    gather: Gather = "all"
    keeps_outputs: bool = True
    seed: int = field(default_factory=torch.initial_seed)
    stream: int = field(default_factory=drawn_seed)
    ckpt_path: str | os.PathLike[str] | None = None
    checkpoint: dict[str, Any] | None = None
    datamodule: DataModule | None = None

    def __post_init__(self) -> None:
        first = next(iter(self.loaders))
        if _is_data_module(self.loaders[first]) and self.datamodule is None:
            self.datamodule, self.loaders[first] = self.loaders[first], None
        if self.datamodule is not None and not _is_data_module(self.datamodule):
            check_is_a("datamodule", self.datamodule, (DataModule, type(None)), "a DataModule")
        if self.ckpt_path == "hpc":
            raise ConfigurationError(
                message='ckpt_path="hpc" names no checkpoint here.',
                facts="in a job that Slurm has requeued, fit() continues by itself.",
                remedy='leave it out; or ckpt_path="last".',
            )
        if self.datamodule is not None and any(given is not None for given in self.loaders.values()):
            raise ConfigurationError(
                message=f"{self.name}() was given loaders and a data module, which has loaders too.",
                remedy="pass one of them.",
            )

    def check_module(self, module: TrainingModule) -> None:
        """Raise ConfigurationError unless the module has the step, and there is a loader for this stage.

        Warn of methods of the module that are not called, because there is a data module.
        """
        has_loader = {phase: self._has_loader(module, phase) for phase in self.loaders}
        phase, step = "train" if self.name == "fit" else self.name, _STEPS.get(self.name)
        if step is not None and not is_defined(module, step):
            raise undefined(module, step)
        if not has_loader[phase]:
            raise undefined(self._source(module), _LOADER_HOOKS[phase])
        if self.datamodule is not None:
            _warn_of_hidden(module, self.datamodule, [_LOADER_HOOKS[phase] for phase in self.loaders])
        if loaders_in(self.loaders.get("validate")) and not is_defined(module, "validation_step"):
            raise undefined(module, "validation_step")  # of fit: its loaders would be ignored

    def _source(self, module: TrainingModule) -> Any:
        """Return what has the methods that return loaders: the data module, or else the module."""
        return module if self.datamodule is None else self.datamodule  # either may have a length of 0

    def _has_loader(self, module: TrainingModule, phase: str) -> bool:
        """Return whether there are loaders for a phase: arguments, or a method that returns them."""
        hook, owner = _LOADER_HOOKS[phase], self._source(module)
        base = TrainingModule if self.datamodule is None else DataModule
        if self.loaders[phase] is not None or not is_own(owner, base, hook):
            return self.loaders[phase] is not None
        name, method = f"{type(owner).__name__}.{hook}", getattr(owner, hook)
        if not callable(method):
            expected = "a method that returns loaders, or None"
            raise InvalidTypeError(argument=name, value=method, expected=expected)
        return True

    def load_checkpoint(self, context: LoopContext) -> None:
        """Find and load what `ckpt_path` means."""
        self.ckpt_path = CheckpointFiles(context).find(self.ckpt_path)
        if self.ckpt_path is not None:
            self.checkpoint = context.strategy.load_checkpoint(self.ckpt_path)

    def run(self, context: LoopContext) -> Any:
        """Run the stage on this rank; return its value. Collective: every rank must call this."""
        status, loggers = "failed", list(context.loggers)
        try:
            with (
                _torch_flags(context.options),
                self._random_state_kept(context),
                _profiled(context, self.name),
            ):
                value = self._run_reported(context)
            status = "success"
        except BaseException as error:
            context.state.status = TrainerStatus.INTERRUPTED
            context.hooks.call_exception_hooks(as_raised(error))
            raise
        finally:
            report_phase(TEARDOWN)
            try:
                with errors_logged("teardown") if status == "failed" else nullcontext():
                    context.hooks.call("teardown", self.name)
            except BaseException:
                status = "failed"
                raise
            finally:
                if context.strategy.is_global_zero:
                    finalize_all([*loggers, *context.loggers], status)  # hooks may have replaced some
        return value

    def _run_reported(self, context: LoopContext) -> Any:
        """Run the stage; report a failure before any hook of the user follows, which may hang."""
        try:
            return self._run(context)
        except BaseException as error:
            context.strategy.job.report_failure(error)
            raise

    @contextmanager
    def _random_state_kept(self, context: LoopContext) -> Iterator[None]:
        """Restore this process's random state after the block, in which other streams are drawn from.

        The caller has drawn one number for the stage, and so has the same state after it on any number of
        ranks.
        """
        device = context.strategy.root_device
        before = get_random_state(device)
        try:
            yield
        finally:
            set_random_state(before, device)

    def _run(self, context: LoopContext) -> Any:
        strategy, module = context.strategy, context.module
        self._agree_on_checkpoint(context)
        self._agree_on_seed_and_loggers(context)
        context.stage.datamodule = self.datamodule
        owners: list[DataHooks] = [each for each in (context.datamodule, module) if each is not None]
        for owner in owners:
            _prepare_data(strategy, owner)
        context.hooks.call("setup", self.name)
        context.hooks.call("configure_model")
        if self.checkpoint is not None:
            restore_module(context, self.checkpoint)
        if self.name == "fit":
            return self._fit(context)
        # A module that is only evaluated is not wrapped: the ranks may have different numbers of batches.
        strategy.module_to_device(strategy.precision.convert_module(module))
        if strategy.world_size > 1:
            check_ranks_agree(strategy, fingerprint_of(module))
            share_model(strategy, module)
        shards = self._shards(context, self.name, self._given(context, self.name))
        part_streams(context, self.stream)
        loop = EvaluationLoop(context, shards, self.name)
        if self.name != "predict":
            return loop.run()
        if not self.keeps_outputs:
            return loop.predict_only()
        if self.gather is not None:
            check_can_be_gathered(shards, strategy.world_size)
        return loop.predict(self.gather)

    def _agree_on_checkpoint(self, context: LoopContext) -> None:
        """Load one checkpoint on all ranks; after a restart, the job's newest.

        Rank 0 finds it. In a script it may just have written it, so the others load it here.
        """
        strategy, files = context.strategy, CheckpointFiles(context)

        def find() -> tuple[bool, str | None]:
            newest = files.newest_of_job(self.ckpt_path) if self.name == "fit" else None
            return newest is not None, newest or files.find(self.ckpt_path)

        is_newest, path = strategy.call_on_rank_zero(find)
        if is_newest or path != self.ckpt_path:  # another one may have been loaded before the job
            self.ckpt_path, self.checkpoint = path, None
        with errors_shared(strategy):
            if path is not None:
                if self.checkpoint is None:
                    self.checkpoint = strategy.load_checkpoint(path)
                if self.name == "fit":  # an evaluation takes the weights of any program's file
                    check_contents(self.checkpoint, path)
        context.state.ckpt_path = path
        check_ranks_agree(strategy, fingerprint_of_checkpoint(self.checkpoint))

    def _agree_on_seed_and_loggers(self, context: LoopContext) -> None:
        """Use rank 0's seeds, or the seed of the run that continues, and the state of rank 0's loggers.

        A run continues unless this process was seeded again since it began.
        """
        state, strategy = context.state, context.strategy
        own, self.stream = strategy.broadcast((self.seed, self.stream))
        seed_process(self.stream, strategy.root_device)
        saved = self.checkpoint if self.name == "fit" else None
        if self.name == "fit" and (saved is not None or own != state.process_seed):
            state.rank_states = []
        if not state.rank_states:
            state.seed, state.process_seed = (saved or {}).get("seed", own), own
        share_states(strategy, context.loggers)

    def _fit(self, context: LoopContext) -> None:
        strategy, module = context.strategy, context.module
        check_ranks_agree(strategy, fingerprint_of(module, given_seed()))
        context.wrapped = context.stage.wrapped = strategy.setup_module(module)
        train_data = cache(lambda: self._train_data(context))  # configure_optimizers may ask for its length
        context.stage.load_train_data = train_data
        import_dynamo()  # an optimizer would
        context.optimizer_set.create(module, strategy)
        strategy.on_after_setup_optimizers(context.optimizers)
        rank_state = self._restore_fit(context)
        with errors_shared(strategy):
            logged = _logged_hparams(context) if context.loggers else {}
            for logger in context.loggers if strategy.is_global_zero else ():
                if logged and context.options.enable_autolog_hparams:
                    logger.log_hyperparams(logged)
                logger.log_graph(module)
        context.hooks.call("on_fit_start")
        validates, load_validation = self._validates(context), partial(self._validation, context)
        is_new_epoch = not context.state.progress.is_within_epoch
        is_checked = validates and is_new_epoch and bool(context.options.num_sanity_val_steps)
        # As in Lightning, loaders are made in this order, and loaders that no epoch needs yet are made later.
        validation = run_sanity_check(context, load_validation) if is_checked else None
        data = train_data()
        is_due = validates and context.has_validation_in_epoch
        if is_due and not is_checked:
            validation = load_validation()
        is_loaded = is_checked or is_due
        context.state.has_validation = validation is not None if is_loaded else validates
        context.stage.load_train_data = None
        reload = {"train": self._train_data, "validate": self._validation}
        loop = FitLoop(context, data, validation, rank_state, reload)
        if context.profiler.is_active:
            loop.profile(context.profiler)
        try:
            loop.run()
        except StoppedBySignal:
            _unwrap(context)
            context.optimizer_set.release_sharded(strategy)
            raise
        _unwrap(context)
        context.hooks.call("on_fit_end")
        context.optimizer_set.release_sharded(strategy)

    def _restore_fit(self, context: LoopContext) -> RankState | None:
        """Restore what the checkpoint holds beside the weights; return this rank's part of it.

        Without a checkpoint, return this rank's part of the fit that continues, if one does.
        """
        strategy, state, saved = context.strategy, context.state, self.checkpoint
        states, state.rank_states = state.rank_states, []  # none until this fit has ended
        note_trained(context, saved)
        order: list[int] = []
        if saved is not None:
            order = saved.get("gradient_order", [])
        elif states:
            order = strategy.broadcast(state.gradient_order)  # each rank's own: they may use different layers
        if order:
            replay_gradient_order(strategy, context.wrapped, order)
        if saved is not None:
            rank_state = restore_training(context, saved)
            if state.progress.is_epoch_closed:
                end_epoch(context)
            return rank_state
        strategy.gradients.reload_states()  # communication hooks have counted the replay
        if not states:
            return None
        rank_state = RankState(context, states, "the fit before")
        rank_state.restore_metric_objects()
        return rank_state

    def _train_data(self, context: LoopContext) -> TrainData:
        given, state, strategy = self._given(context, "train"), context.state, context.strategy
        order_seed = (self.checkpoint or {}).get("order_seed")  # a run that continues keeps its order
        if context.options.reload_dataloaders_every_n_epochs and self.loaders["train"] is None:
            order_seed = None  # loaders that are made again have their own
        shards = self._shards(context, "train", given, order_seed)
        limit, combination = context.options.limit("train"), combination_of(given)
        data = TrainData(shards, state.seed, limit, strategy, combination)
        state.num_batches["train"] = [data.num_batches]
        return data

    def _validates(self, context: LoopContext) -> bool:
        """Return whether a fit validates: there are a step, loaders and a limit that is not 0."""
        is_limited = context.options.limit("validate") == 0
        has_step = is_defined(context.module, "validation_step")
        return has_step and not is_limited and self._has_loader(context.module, "validate")

    def _validation(self, context: LoopContext) -> EvaluationLoop | None:
        if not self._validates(context):
            return None
        shards = self._shards(context, "validate", self._given(context, "validate"))
        # A rank without batches of its own takes part in the collectives of the others' validation.
        has_batches = context.strategy.reduce_boolean_decision(
            any(shard.num_batches for shard in shards), all=False
        )
        return EvaluationLoop(context, shards, "validate") if has_batches else None

    def _given(self, context: LoopContext, phase: str) -> Any:
        """Return the loaders of a phase as the user has given them.

        Loaders that a fit reloads are made with random numbers of their epoch, also in a run that resumes
        there.
        """
        given, owner = self.loaders[phase], self._source(context.module)
        epoch, every = context.state.progress.current_epoch, context.options.reload_dataloaders_every_n_epochs
        context.stage.loaded_epochs[phase] = epoch
        if given is not None or self.name != "fit" or not every:
            return getattr(owner, _LOADER_HOOKS[phase])() if given is None else given
        with isolated_random_state(mixed_seed(context.state.seed, epoch // every)):
            return getattr(owner, _LOADER_HOOKS[phase])()

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
        check_num_loaders(self.name, phase, loaders)
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


def _prepare_data(strategy: Strategy, owner: DataHooks) -> None:
    """Call `prepare_data` where it is due; all ranks continue with the random state of rank 0 after it."""
    if prepares_data(owner, strategy.local_rank, strategy.node_rank):
        owner.prepare_data()
    strategy.barrier("prepare_data")
    base = DataModule if isinstance(owner, DataModule) else TrainingModule
    if strategy.world_size > 1 and is_own(owner, base, "prepare_data"):
        device = strategy.root_device
        set_random_state(strategy.broadcast(get_random_state(device)), device)


def _unwrap(context: LoopContext) -> None:
    """Undo what `setup_module` has done. Nothing may keep the wrapper when the process group is destroyed."""
    context.strategy.restore_module(context.module)
    context.wrapped, context.stage.wrapped = context.module, None


def own_classes(trainer: object, *given: Any) -> AbstractContextManager[None]:
    """Return a block in which Lightning's modules and data modules also have rankwise's base class."""
    foreign = [each for each in given if not isinstance(each, (TrainingModule, DataModule, NoneType))]
    if not foreign:
        return nullcontext()
    from rankwise.compatibility.lightning_classes import classes_lent

    return classes_lent(
        trainer, foreign, {"LightningModule": TrainingModule, "LightningDataModule": DataModule}
    )


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
        warnings.warn(
            f"Of {type(module).__name__} these methods are not called, as there is a data module: "
            f"{', '.join(names)}. Keep them in {type(datamodule).__name__} only.",
            stacklevel=5,
        )


def _logged_hparams(context: LoopContext) -> dict[str, Any]:
    """Return the hyperparameters of the data module and the module; raise if they contradict each other."""
    own, of_data = (
        {} if each is None or each._hyperparameters is None else each.logged_hparams
        for each in (context.module, context.datamodule)
    )
    for name in own.keys() & of_data.keys():
        if own[name] is not of_data[name] and own[name] != of_data[name]:
            raise ConfigurationError(
                message=f"Module and data module have different values of the hyperparameter {name!r}.",
                facts=f"{own[name]!r} and {of_data[name]!r}; loggers take one.",
                remedy="self.save_hyperparameters(logger=False) in one of them, or another name.",
            )
    return {**of_data, **own}

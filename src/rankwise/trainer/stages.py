"""A stage: a Trainer's fit, validate, test or predict on each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from types import NoneType
from typing import Any, final

import torch

from rankwise.errors import ConfigurationError
from rankwise.loggers.base import finalize_all
from rankwise.monitoring.heartbeat import TEARDOWN, report_phase
from rankwise.processes.fork_safety import import_dynamo
from rankwise.processes.signals import StoppedBySignal, as_raised
from rankwise.seed import (
    drawn_seed,
    get_random_state,
    given_seed,
    random_state_kept,
    seed_process,
    set_random_state,
)
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import check_ranks_agree, fingerprint_of, share_model, share_states
from rankwise.strategies.collectives import errors_shared
from rankwise.trainer import checkpointing
from rankwise.trainer.consistency import fingerprint_of_checkpoint
from rankwise.trainer.data import DataModule
from rankwise.trainer.data.data_module import DataHooks, is_own, prepares_data, undefined
from rankwise.trainer.data.loader_shard import TrainData
from rankwise.trainer.data.stage_loaders import StageLoaders, check_can_be_gathered
from rankwise.trainer.hooks import errors_logged
from rankwise.trainer.loops.bucket_order import replay_gradient_order
from rankwise.trainer.loops.evaluation import EvaluationLoop, EvaluationName, Gather, run_sanity_check
from rankwise.trainer.loops.fit import FitLoop, end_epoch
from rankwise.trainer.module import TrainingModule, is_defined
from rankwise.trainer.stage_parts import describe_run, profiled, torch_flags_set
from rankwise.trainer.state import LoopContext, StageName, TrainerStatus
from rankwise.trainer.state_transfer import RankState

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}


@final
@dataclass
class Stage:
    """A stage: its arguments, and its work on each rank."""

    loaders: StageLoaders
    gather: Gather = "all"  # which ranks get the predictions
    keeps_outputs: bool = True  # whether any rank gets them
    # Of this process; the trainer uses rank 0's, or the seed of the run that continues:
    seed: int = field(default_factory=torch.initial_seed)
    # Of the random numbers that are drawn in the stage; rank 0's counts:
    stream: int = field(default_factory=drawn_seed)
    ckpt_path: str | os.PathLike[str] | None = None  # also "best" or "last", until it is found
    checkpoint: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.ckpt_path == "hpc":
            raise ConfigurationError(
                message='ckpt_path="hpc" names no checkpoint here.',
                facts="in a job that Slurm has requeued, fit() continues by itself.",
                remedy='leave it out; or ckpt_path="last".',
            )

    @property
    def name(self) -> StageName:
        """The name of the stage: "fit", "validate", "test" or "predict"."""
        return self.loaders.stage

    def check_module(self, module: TrainingModule) -> None:
        """Raise ConfigurationError unless the module has the step, and there is a loader for this stage."""
        step = _STEPS.get(self.name)
        if step is not None and not is_defined(module, step):
            raise undefined(module, step)
        self.loaders.check(module)

    def load_checkpoint(self, context: LoopContext) -> None:
        """Find and load what `ckpt_path` means."""
        self.ckpt_path = checkpointing.CheckpointFiles(context).find(self.ckpt_path)
        if self.ckpt_path is not None:
            self.checkpoint = context.strategy.load_checkpoint(self.ckpt_path)

    def run(self, context: LoopContext) -> Any:
        """Run the stage on this rank; return its value. Collective: every rank must call this."""
        status, loggers = "failed", list(context.loggers)
        try:
            with ExitStack() as parts:
                for part in self._parts(context):
                    parts.enter_context(part)
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

    def _parts(self, context: LoopContext) -> Iterator[AbstractContextManager[None]]:
        """Return the parts around the stage that it asks for, the outermost first."""
        options = context.options
        if options.deterministic or options.detect_anomaly or options.benchmark is not None:
            yield torch_flags_set(options)
        # The caller has drawn one number for the stage; so its state does not depend on the number of ranks.
        yield random_state_kept(context.strategy.root_device)
        if context.profiler.is_active:
            yield profiled(context, self.name)

    def _run(self, context: LoopContext) -> Any:
        strategy, module = context.strategy, context.module
        self._agree_on_checkpoint(context)
        self._agree_on_seed_and_loggers(context)
        context.stage.datamodule = self.loaders.datamodule
        for owner in (context.datamodule, module):
            if owner is not None:
                _prepare_data(strategy, owner)
        context.hooks.call("setup", self.name)
        context.hooks.call("configure_model")
        if self.checkpoint is not None:
            checkpointing.restore_module(context, self.checkpoint)
        return self._fit(context) if self.name == "fit" else self._evaluate(context, self.name)

    def _agree_on_checkpoint(self, context: LoopContext) -> None:
        """Load one checkpoint on all ranks; after a restart, the job's newest.

        Rank 0 finds it. In a script it may just have written it, so the others load it here.
        """
        strategy, files = context.strategy, checkpointing.CheckpointFiles(context)

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
                    checkpointing.check_contents(self.checkpoint, path)
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

    def _evaluate(self, context: LoopContext, phase: EvaluationName) -> Any:
        """Evaluate or predict. The module is not wrapped: ranks may have different numbers of batches."""
        strategy, module = context.strategy, context.module
        strategy.module_to_device(strategy.precision.convert_module(module))
        if strategy.world_size > 1:
            check_ranks_agree(strategy, fingerprint_of(module))
            share_model(strategy, module)
        shards = self.loaders.evaluation_shards(context, phase)
        context.part_streams(self.stream)
        loop = EvaluationLoop(context, shards, phase)
        if phase != "predict":
            return loop.run()
        if not self.keeps_outputs:
            return loop.predict_only()
        if self.gather is not None:
            check_can_be_gathered(shards, strategy.world_size)
        return loop.predict(self.gather)

    def _fit(self, context: LoopContext) -> None:
        strategy, module = context.strategy, context.module
        check_ranks_agree(strategy, fingerprint_of(module, given_seed()))
        context.wrapped = context.stage.wrapped = strategy.setup_module(module)
        order_seed = (self.checkpoint or {}).get("order_seed")  # a run that continues keeps its order
        load_train = partial(self.loaders.train_data, order_seed=order_seed)
        train_data = cache(partial(load_train, context))  # configure_optimizers may ask for its length
        context.stage.load_train_data = train_data
        import_dynamo()  # an optimizer would
        context.optimizer_set.create(module, strategy)
        strategy.on_after_setup_optimizers(context.optimizers)
        rank_state = self._restore_fit(context)
        with errors_shared(strategy):
            if context.loggers:
                describe_run(context)
        context.hooks.call("on_fit_start")
        data, validation = self._load(context, train_data)
        context.stage.load_train_data = None
        reload: dict[str, Callable[..., Any]] = {"train": load_train, "validate": self._validation}
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
        """Restore all but the weights; return this rank's part of the checkpoint, or of the fit before."""
        strategy, state, saved = context.strategy, context.state, self.checkpoint
        states, state.rank_states = state.rank_states, []  # none until this fit has ended
        checkpointing.note_trained(context, saved)
        order: list[int] = []
        if saved is not None:
            order = saved.get("gradient_order", [])
        elif states:
            order = strategy.broadcast(state.gradient_order)  # each rank's own: they may use different layers
        if order:
            replay_gradient_order(strategy, context.wrapped, order)
        if saved is not None:
            rank_state = checkpointing.restore_training(context, saved)
            if state.progress.is_epoch_closed:
                end_epoch(context)
            return rank_state
        strategy.gradients.reload_states()  # communication hooks have counted the replay
        if not states:
            return None
        rank_state = RankState(context, states, "the fit before")
        rank_state.restore_metric_objects()
        return rank_state

    def _load(
        self, context: LoopContext, train_data: Callable[[], TrainData]
    ) -> tuple[TrainData, EvaluationLoop | None]:
        """Return the training data and the validation, if one is made now; check the latter if asked for.

        As in Lightning, loaders are made in this order, and loaders that no epoch needs yet are made later.
        """
        validates, load_validation = self._validates(context), partial(self._validation, context)
        is_new_epoch = not context.state.progress.is_within_epoch
        is_checked = validates and is_new_epoch and bool(context.options.num_sanity_val_steps)
        validation = run_sanity_check(context, load_validation) if is_checked else None
        data = train_data()
        is_due = validates and context.has_validation_in_epoch
        if is_due and not is_checked:
            validation = load_validation()
        is_loaded = is_checked or is_due
        context.state.has_validation = validation is not None if is_loaded else validates
        return data, validation

    def _validation(self, context: LoopContext) -> EvaluationLoop | None:
        if not self._validates(context):
            return None
        shards = self.loaders.evaluation_shards(context, "validate")
        # A rank without batches of its own takes part in the collectives of the others' validation.
        has_own = any(shard.num_batches for shard in shards)
        has_batches = context.strategy.reduce_boolean_decision(has_own, all=False)
        return EvaluationLoop(context, shards, "validate") if has_batches else None

    def _validates(self, context: LoopContext) -> bool:
        """Return whether a fit validates: there are a step, loaders and a limit that is not 0."""
        is_limited = context.options.limit("validate") == 0
        has_step = is_defined(context.module, "validation_step")
        return has_step and not is_limited and self.loaders.has(context.module, "validate")


def _prepare_data(strategy: Strategy, owner: DataHooks) -> None:
    """Call `prepare_data` where it is due; all ranks continue with the random state of rank 0 after it."""
    if prepares_data(owner, strategy.local_rank, strategy.node_rank):
        owner.prepare_data()
    strategy.barrier("prepare_data")
    if strategy.world_size > 1 and is_own(owner, DataHooks, "prepare_data"):
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

    bases = {"LightningModule": TrainingModule, "LightningDataModule": DataModule}
    return classes_lent(trainer, foreign, bases)

"""A stage: what a Trainer's fit, validate, test or predict does on each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.monitoring.heartbeat import TEARDOWN, failure_time_of, report_phase
from rankwise.seed import given_seed
from rankwise.trainer.checkpointing import (
    CheckpointFiles,
    restore_module,
    restore_training,
)
from rankwise.trainer.consistency import (
    agreed_order_seeds,
    check_ranks_agree,
    fingerprint_of,
    fingerprint_of_checkpoint,
    fingerprint_of_loaders,
)
from rankwise.trainer.data_loaders import (
    LoaderShard,
    TrainDataShard,
    as_list,
    check_can_be_gathered,
    shard_for_phase,
)
from rankwise.trainer.loops.bucket_order import replay_gradient_order
from rankwise.trainer.loops.evaluation import EvaluationLoop, Gather
from rankwise.trainer.loops.fit import FitLoop
from rankwise.trainer.module import is_defined, undefined

if TYPE_CHECKING:
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.state import StageContext, StageName
    from rankwise.trainer.state_transfer import RankState

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@final
@dataclass
class StageSpec:
    """The arguments of a stage, beside its context and the loaders.

    `seed` is this process's; the trainer's is rank 0's, or that of the run that continues.
    """

    stage: StageName
    seed: int
    checkpoint: dict[str, Any] | None = None
    checkpoint_path: str = ""
    gather: Gather = "all"


def check_module(module: TrainingModule, stage: StageName, loaders: dict[str, Any]) -> None:
    """Raise ConfigurationError unless the module has the step and a loader for a stage."""
    phase = "train" if stage == "fit" else stage
    step = _STEPS.get(stage)
    if step is not None and not is_defined(module, step):
        raise undefined(module, step)
    if not _has_loader(module, phase, loaders):
        raise undefined(module, _LOADER_HOOKS[phase])


def _has_loader(module: TrainingModule, phase: str, loaders: dict[str, Any]) -> bool:
    return loaders[phase] is not None or is_defined(module, _LOADER_HOOKS[phase])


@contextmanager
def torch_flags_set(deterministic: bool | str, benchmark: bool | None) -> Iterator[None]:
    """Set torch's flags as the Trainer's options of the same names say, for the block.

    Mutates: torch's flags and, with `deterministic`, cuBLAS's environment variable; both until the end.
    """
    with ExitStack() as stack:
        if deterministic:
            was_on = torch.are_deterministic_algorithms_enabled()
            was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, was_on, warn_only=was_warning)
            torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
            if _CUBLAS not in os.environ:
                stack.callback(os.environ.pop, _CUBLAS, None)
                os.environ[_CUBLAS] = ":4096:8"  # without it cuBLAS is not deterministic
        if benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = benchmark
        yield


def run_stage(context: StageContext, loaders: dict[str, Any], spec: StageSpec) -> Any:
    """Run a stage on this rank; return its value. Collective: every rank must call this.

    `loaders` has the user's loaders by phase; None for the module's own.
    """
    status, loggers = "failed", list(context.loggers)
    try:
        with torch_flags_set(context.options.deterministic, context.options.benchmark):
            value = _Stage(context, loaders, spec).run()
        status = "success"
    except BaseException as error:
        failure_time_of(error)  # notes the time before the hooks take theirs
        context.hooks.call_exception_hooks(error)
        raise
    finally:
        report_phase(TEARDOWN)
        context.hooks.call("teardown", spec.stage)
        if context.strategy.is_global_zero:
            used = [*loggers, *context.loggers]  # hooks may have replaced some
            for logger in {id(logger): logger for logger in used}.values():
                logger.finalize(status)
    return value


@final
class _Stage:
    """A stage on this rank."""

    def __init__(self, context: StageContext, loaders: dict[str, Any], spec: StageSpec) -> None:
        self._context = context
        self._strategy = context.strategy
        self._module = context.module
        self._state = context.state
        self._loaders = loaders
        self._spec = spec

    def run(self) -> Any:
        """Prepare the stage, run its loop and return its value."""
        self._find_checkpoint()
        self._agree_on_seed_and_loggers()
        if self._strategy.local_rank == 0:
            self._module.prepare_data()
        self._strategy.barrier("prepare_data")
        self._context.hooks.call("setup", self._spec.stage)
        if self._spec.checkpoint is not None:
            restore_module(self._context, self._spec.checkpoint, self._spec.checkpoint_path)
        if self._spec.stage == "fit":
            return self._fit()
        # A module that is only evaluated is not wrapped: the ranks may have different numbers of batches.
        self._strategy.module_to_device(self._strategy.precision.convert_module(self._module))
        shards = self._shards(self._spec.stage)
        loop = EvaluationLoop(self._context, shards, self._spec.stage)
        if self._spec.stage != "predict":
            return loop.run()
        if self._spec.gather is not None:
            check_can_be_gathered(shards, self._strategy.world_size)
        return loop.predict(self._spec.gather)

    def _find_checkpoint(self) -> None:
        """After a restart, use the job's newest checkpoint; make sure that all ranks have the same."""
        spec = self._spec
        if spec.stage == "fit" and (found := CheckpointFiles(self._context).find_after_restart()):
            spec.checkpoint_path, spec.checkpoint = found
            self._state.ckpt_path = spec.checkpoint_path
        check_ranks_agree(self._strategy, fingerprint_of_checkpoint(spec.checkpoint))

    def _agree_on_seed_and_loggers(self) -> None:
        """Use rank 0's seed, or that of the run that continues, and the state of rank 0's loggers."""
        spec, loggers = self._spec, self._context.loggers
        saved = spec.checkpoint if spec.stage == "fit" and spec.checkpoint else {}
        self._state.seed = self._strategy.broadcast(saved.get("seed", spec.seed))
        states = self._strategy.broadcast([logger.state_dict() for logger in loggers])
        for logger, state in zip(loggers, states, strict=True):
            logger.load_state_dict(state)

    def _fit(self) -> None:
        context = self._context
        check_ranks_agree(self._strategy, fingerprint_of(self._module, given_seed()))
        context.wrapped = self._strategy.setup_module(self._module)
        context.optimizer_set.create(self._module, self._strategy.precision)
        self._strategy.on_after_setup_optimizers(context.optimizers)
        rank_state = self._restore_fit()
        self._log_hyper_parameters()
        data = self._train_data()
        validation = self._validation()
        self._state.has_validation = validation is not None
        context.hooks.call("on_fit_start")
        FitLoop(context, data, validation, rank_state).run()
        self._strategy.restore_module(self._module)
        context.wrapped = self._module  # nothing may keep the wrapper when the process group is destroyed
        context.hooks.call("on_fit_end")

    def _restore_fit(self) -> RankState | None:
        """Restore what the checkpoint holds beside the weights; return this rank's part of it."""
        checkpoint = self._spec.checkpoint
        if checkpoint is None:
            return None
        replay_gradient_order(self._strategy, self._context.wrapped, checkpoint.get("gradient_order", []))
        return restore_training(self._context, checkpoint, self._spec.checkpoint_path)

    def _log_hyper_parameters(self) -> None:
        if self._module.hparams and self._strategy.is_global_zero:
            for logger in self._context.loggers:
                logger.log_hyperparams(self._module.hparams)

    def _train_data(self) -> TrainDataShard:
        order_seed = (self._spec.checkpoint or {}).get("order_seed")  # a run that continues keeps its order
        shard = self._shards("train", order_seed)[0]
        return TrainDataShard(shard, self._state.seed, self._context.options.limit("train"), self._strategy)

    def _validation(self) -> EvaluationLoop | None:
        has_step = is_defined(self._module, "validation_step")
        if not has_step or not _has_loader(self._module, "validate", self._loaders):
            return None
        shards = self._shards("validate")
        has_batches = any(shard.num_batches for shard in shards)
        return EvaluationLoop(self._context, shards, "validate") if has_batches else None

    def _shards(self, phase: str, order_seed: int | None = None) -> list[LoaderShard]:
        """Return this rank's part of each loader of a phase; `order_seed` replaces the training loader's."""
        given, options = self._loaders[phase], self._context.options
        loaders = as_list(getattr(self._module, _LOADER_HOOKS[phase])() if given is None else given)
        is_split_here = options.use_distributed_sampler
        check_ranks_agree(self._strategy, fingerprint_of_loaders(phase, loaders, is_split_here))
        seeds = agreed_order_seeds(
            self._strategy, loaders, default=self._state.seed, is_split_here=is_split_here
        )
        if phase == "train":
            self._state.order_seed = seeds[0] = seeds[0] if order_seed is None else order_seed
        shards = [
            shard_for_phase(phase, loader, seed, options, self._strategy)
            for loader, seed in zip(loaders, seeds, strict=True)
        ]
        self._state.num_batches[phase] = [shard.num_batches for shard in shards]
        return shards

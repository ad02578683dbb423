"""A stage: what a Trainer's fit, validate, test or predict does on each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from rankwise.monitoring.heartbeat import TEARDOWN, failure_time_of, report_phase
from rankwise.seed import given_seed
from rankwise.trainer.checkpointing import (
    checkpoint_after_restart,
    restore_loop,
    restore_module,
    stop_checkpoint_path,
)
from rankwise.trainer.consistency import (
    agreed_order_seeds,
    check_ranks_agree,
    fingerprint_of,
    fingerprint_of_checkpoint,
    fingerprint_of_loaders,
)
from rankwise.trainer.data_loaders import TrainDataShard, as_list, check_can_be_gathered, share_for
from rankwise.trainer.hooks import Hooks
from rankwise.trainer.loops.bucket_order import replay_gradient_order
from rankwise.trainer.loops.context import LoopContext
from rankwise.trainer.loops.evaluation import EvaluationLoop
from rankwise.trainer.loops.fit import FitLoop
from rankwise.trainer.loops.prediction import Gather, PredictionLoop
from rankwise.trainer.module import is_defined, undefined
from rankwise.trainer.state_transfer import CallerState, capture

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.trainer import Trainer

__all__ = ["StageName", "StageSpec", "check_module", "loop_context", "run_stage", "torch_flags_set"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def torch_flags_set(trainer: Trainer) -> Iterator[None]:
    """Have `deterministic` and `benchmark` in force in the block.

    Mutates: torch's flags and, with `deterministic`, cuBLAS's environment variable; both until the end.
    """
    with ExitStack() as stack:
        if trainer.deterministic:
            stack.enter_context(_deterministic(warn_only=trainer.deterministic == "warn"))
        if trainer.benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = trainer.benchmark
        yield


@contextmanager
def _deterministic(*, warn_only: bool) -> Iterator[None]:
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    is_workspace_ours = _CUBLAS not in os.environ
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    os.environ.setdefault(_CUBLAS, ":4096:8")  # what cuBLAS needs to be deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
        if is_workspace_ours:
            del os.environ[_CUBLAS]


StageName = Literal["fit", "validate", "test", "predict"]
LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@final
@dataclass
class StageSpec:
    """What a stage needs to know beside trainer and module.

    Attributes:
        stage: which one.
        seed: of this process; the trainer's is rank 0's, or that of the run that goes on.
        brings_state_back: whether the calling process is another one than rank 0's.
        checkpoint: what to go on from, or to evaluate.
        checkpoint_path: where that came from.
        gather: which ranks get the predictions.
    """

    stage: StageName
    seed: int
    brings_state_back: bool
    checkpoint: dict[str, Any] | None = None
    checkpoint_path: str = ""
    gather: Gather = "all"


def check_module(module: TrainingModule, stage: StageName, loaders: dict[str, Any]) -> None:
    """Make sure, before anything starts, that the module has the step and a loader for a stage.

    Raises:
        ConfigurationError: when it has not.
    """
    phase = "train" if stage == "fit" else stage
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(stage)
    if needed is not None and not is_defined(module, needed):
        raise undefined(module, needed)
    if not _has_loader(module, phase, loaders):
        raise undefined(module, LOADER_HOOKS[phase])


def run_stage(
    strategy: Strategy, *, model: TrainingModule, trainer: Trainer, loaders: dict[str, Any], spec: StageSpec
) -> tuple[Any, CallerState | None]:
    """Run a stage on this rank; return its value, and on rank 0 what the calling process must know.

    Collective: every rank runs this.
    """
    known_modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    trainer.enter_stage(strategy, model, spec.stage)
    status = "failed"
    try:
        with torch_flags_set(trainer):
            _prepare(trainer, model, spec)
            value = _RUNNERS[spec.stage](trainer, model, loaders, spec)
        status = "success"
    except BaseException as error:
        failure_time_of(error)  # which it keeps: the hooks take their time
        for callback in trainer.callbacks:
            callback.on_exception(trainer, model, error)
        raise
    finally:
        report_phase(TEARDOWN)
        try:
            Hooks(trainer, model).call("teardown", spec.stage)
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.finalize(status)
        finally:
            trainer.leave_stage()
            report_phase("running")
    return value, capture(trainer, model, known_modules) if spec.brings_state_back else None


def _prepare(trainer: Trainer, module: TrainingModule, spec: StageSpec) -> None:
    strategy = trainer.strategy
    if spec.stage == "fit" and (found := checkpoint_after_restart(trainer)):
        spec.checkpoint_path, spec.checkpoint = found
        trainer.ckpt_path = spec.checkpoint_path
    check_ranks_agree(strategy, fingerprint_of_checkpoint(spec.checkpoint))
    trainer.seed = strategy.broadcast(_seed_of(spec))
    for logger, state in zip(
        trainer.loggers, strategy.broadcast([logger.state_dict() for logger in trainer.loggers]), strict=True
    ):
        logger.load_state_dict(state)
    if strategy.local_rank == 0:
        module.prepare_data()
    strategy.barrier("prepare_data")
    Hooks(trainer, module).call("setup", spec.stage)
    if spec.checkpoint is not None:
        restore_module(trainer, module, spec.checkpoint, spec.checkpoint_path)


def _seed_of(spec: StageSpec) -> int:
    """Return the seed of the run that goes on, if one does: its data come in its order."""
    seed: int = (spec.checkpoint or {}).get("seed", spec.seed) if spec.stage == "fit" else spec.seed
    return seed


def _fit(trainer: Trainer, module: TrainingModule, loaders: dict[str, Any], spec: StageSpec) -> None:
    check_ranks_agree(trainer.strategy, fingerprint_of(module, given_seed()))
    wrapped = trainer.strategy.setup_module(module)
    trainer.create_optimizers()
    trainer.strategy.on_after_setup_optimizers(trainer.optimizers)
    rank_state = None
    if spec.checkpoint is not None:
        replay_gradient_order(trainer.strategy, wrapped, spec.checkpoint.get("gradient_order", []))
        rank_state = restore_loop(trainer, spec.checkpoint, spec.checkpoint_path)
    if trainer.loggers and module.hparams and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_hyperparams(module.hparams)
    order_seed = (spec.checkpoint or {}).get("order_seed")  # what goes on keeps to its order
    own = _shares(trainer, module, "train", loaders["train"], order_seed)[0]
    share = TrainDataShard(trainer, own, trainer.seed)
    trainer.num_training_batches = share.num_batches
    context = loop_context(trainer, module, wrapped)
    validation = None
    if is_defined(module, "validation_step") and _has_loader(module, "validate", loaders):
        shares = _shares(trainer, module, "validate", loaders["validate"])
        trainer.num_val_batches = [share.num_batches for share in shares]
        validation = EvaluationLoop(context, shares, "validate") if any(trainer.num_val_batches) else None
    trainer.has_validation = validation is not None
    context.hooks.call("on_fit_start")
    loop = FitLoop(context, share, validation, rank_state)
    trainer.running_manual_optimization = loop.manual_optimization
    loop.run()
    trainer.strategy.restore_module(module)
    context.hooks.call("on_fit_end")


def _evaluate(
    trainer: Trainer, module: TrainingModule, loaders: dict[str, Any], spec: StageSpec
) -> list[dict[str, float]]:
    stage: Any = spec.stage
    _place(trainer, module)
    shares = _shares(trainer, module, stage, loaders[stage])
    counts = [share.num_batches for share in shares]
    if stage == "test":
        trainer.num_test_batches = counts
    else:
        trainer.num_val_batches = counts
    return EvaluationLoop(loop_context(trainer, module), shares, stage).run()


def _predict(trainer: Trainer, module: TrainingModule, loaders: dict[str, Any], spec: StageSpec) -> list[Any]:
    _place(trainer, module)
    shares = _shares(trainer, module, "predict", loaders["predict"])
    if spec.gather is not None:
        check_can_be_gathered(trainer, shares)
    trainer.num_predict_batches = [share.num_batches for share in shares]
    return PredictionLoop(loop_context(trainer, module), shares).run(spec.gather)


def loop_context(trainer: Trainer, module: TrainingModule, wrapped: nn.Module | None = None) -> LoopContext:
    """Return what the loops of a stage use of the trainer; without `wrapped`, for evaluation."""
    return LoopContext(
        strategy=trainer.strategy,
        module=module,
        wrapped=module if wrapped is None else wrapped,
        optimizers=trainer.optimizers,
        schedulers=trainer.lr_scheduler_configs,
        progress=trainer.progress,
        seed=trainer.seed,
        gradient_order=trainer.gradient_order,
        hooks=Hooks(trainer, module),
        metrics=trainer,
        settings=trainer,
        stop=trainer,
        save_stop_checkpoint=None
        if trainer.fast_dev_run
        else lambda: trainer.save_checkpoint(stop_checkpoint_path(trainer)),
    )


_RUNNERS = {"fit": _fit, "validate": _evaluate, "test": _evaluate, "predict": _predict}


def _place(trainer: Trainer, module: TrainingModule) -> None:
    """Move a module that is only evaluated to the device; shards may be uneven, so nothing wraps it."""
    trainer.strategy.module_to_device(trainer.strategy.precision.convert_module(module))


def _has_loader(module: TrainingModule, phase: str, loaders: dict[str, Any]) -> bool:
    return loaders[phase] is not None or is_defined(module, LOADER_HOOKS[phase])


def _shares(
    trainer: Trainer, module: TrainingModule, phase: str, given: Any, order_seed: int | None = None
) -> list[Any]:
    loaders = as_list(getattr(module, LOADER_HOOKS[phase])() if given is None else given)
    check_ranks_agree(
        trainer.strategy, fingerprint_of_loaders(phase, loaders, trainer.use_distributed_sampler)
    )
    seeds = agreed_order_seeds(trainer, loaders)
    if phase == "train":
        trainer.order_seed = seeds[0] = seeds[0] if order_seed is None else order_seed
    return [share_for(trainer, phase, loader, seed) for loader, seed in zip(loaders, seeds, strict=True)]

"""What every rank runs for a stage: prepare data and module, set up, loop, tear down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import final

from rankwise.process_group.failing import moment_of
from rankwise.process_group.pulse import TEARDOWN, beat
from rankwise.seed import given_seed
from rankwise.trainer.checkpoints import restore_loop, restore_module
from rankwise.trainer.evaluation_loop import EvaluationLoop
from rankwise.trainer.fit_loop import FitLoop
from rankwise.trainer.gradient_order import replay_gradient_order
from rankwise.trainer.hooks import call_hook
from rankwise.trainer.loaders import as_list, check_can_be_gathered, share_for
from rankwise.trainer.module import is_defined, undefined
from rankwise.trainer.prediction_loop import Gather, PredictionLoop
from rankwise.trainer.preflight import (
    agreed_order_seeds,
    check_ranks_agree,
    facts_of,
    facts_of_checkpoint,
    facts_of_loaders,
)
from rankwise.trainer.restarts import checkpoint_after_restart
from rankwise.trainer.state import CallerState, capture
from rankwise.trainer.torch_flags import torch_flags_set
from rankwise.trainer.training_share import TrainingShare

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.trainer import Trainer

__all__ = ["Plan", "StageName", "check_module", "run_stage"]

StageName = Literal["fit", "validate", "test", "predict"]
LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@final
@dataclass
class Plan:
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
    strategy: Strategy, *, model: TrainingModule, trainer: Trainer, loaders: dict[str, Any], plan: Plan
) -> tuple[Any, CallerState | None]:
    """Run a stage on this rank; return its value, and on rank 0 what the calling process must know.

    Collective: every rank runs this.
    """
    known_modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    trainer.enter_stage(strategy, model, plan.stage)
    status = "failed"
    try:
        with torch_flags_set(trainer):
            _prepare(trainer, model, plan)
            value = _RUNNERS[plan.stage](trainer, model, loaders, plan)
        status = "success"
    except BaseException as error:
        moment_of(error)  # which it keeps: the hooks take their time
        for callback in trainer.callbacks:
            callback.on_exception(trainer, model, error)
        raise
    finally:
        beat(TEARDOWN)
        try:
            call_hook(trainer, "teardown", plan.stage)
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.finalize(status)
        finally:
            trainer.leave_stage()
            beat("running")
    return value, capture(trainer, model, known_modules) if plan.brings_state_back else None


def _prepare(trainer: Trainer, module: TrainingModule, plan: Plan) -> None:
    strategy = trainer.strategy
    if plan.stage == "fit" and (found := checkpoint_after_restart(trainer)):
        plan.checkpoint_path, plan.checkpoint = found
        trainer.ckpt_path = plan.checkpoint_path
    check_ranks_agree(strategy, facts_of_checkpoint(plan.checkpoint))
    trainer.seed = strategy.broadcast(_seed_of(plan))
    for logger, state in zip(
        trainer.loggers, strategy.broadcast([logger.state_dict() for logger in trainer.loggers]), strict=True
    ):
        logger.load_state_dict(state)
    if strategy.local_rank == 0:
        module.prepare_data()
    strategy.barrier("prepare_data")
    call_hook(trainer, "setup", plan.stage)
    if plan.checkpoint is not None:
        restore_module(trainer, module, plan.checkpoint, plan.checkpoint_path)


def _seed_of(plan: Plan) -> int:
    """Return the seed of the run that goes on, if one does: its data come in its order."""
    seed: int = (plan.checkpoint or {}).get("seed", plan.seed) if plan.stage == "fit" else plan.seed
    return seed


def _fit(trainer: Trainer, module: TrainingModule, loaders: dict[str, Any], plan: Plan) -> None:
    check_ranks_agree(trainer.strategy, facts_of(module, given_seed()))
    wrapped = trainer.strategy.setup_module(module)
    trainer.create_optimizers()
    trainer.strategy.on_after_setup_optimizers(trainer.optimizers)
    rank_state = None
    if plan.checkpoint is not None:
        replay_gradient_order(trainer.strategy, wrapped, plan.checkpoint.get("gradient_order", []))
        rank_state = restore_loop(trainer, plan.checkpoint, plan.checkpoint_path)
    if trainer.loggers and module.hparams and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_hyperparams(module.hparams)
    order_seed = (plan.checkpoint or {}).get("order_seed")  # what goes on keeps to its order
    own = _shares(trainer, module, "train", loaders["train"], order_seed)[0]
    share = TrainingShare(trainer, own, trainer.seed)
    trainer.num_training_batches = share.num_batches
    validation = None
    if is_defined(module, "validation_step") and _has_loader(module, "validate", loaders):
        shares = _shares(trainer, module, "validate", loaders["validate"])
        trainer.num_val_batches = [share.num_batches for share in shares]
        validation = (
            EvaluationLoop(trainer, module, shares, "validate") if any(trainer.num_val_batches) else None
        )
    trainer.has_validation = validation is not None
    call_hook(trainer, "on_fit_start")
    FitLoop(trainer, module, wrapped, share, validation, rank_state).run()
    trainer.strategy.restore_module(module)
    call_hook(trainer, "on_fit_end")


def _evaluate(
    trainer: Trainer, module: TrainingModule, loaders: dict[str, Any], plan: Plan
) -> list[dict[str, float]]:
    stage: Any = plan.stage
    _place(trainer, module)
    shares = _shares(trainer, module, stage, loaders[stage])
    counts = [share.num_batches for share in shares]
    if stage == "test":
        trainer.num_test_batches = counts
    else:
        trainer.num_val_batches = counts
    return EvaluationLoop(trainer, module, shares, stage).run()


def _predict(trainer: Trainer, module: TrainingModule, loaders: dict[str, Any], plan: Plan) -> list[Any]:
    _place(trainer, module)
    shares = _shares(trainer, module, "predict", loaders["predict"])
    if plan.gather is not None:
        check_can_be_gathered(trainer, shares)
    trainer.num_predict_batches = [share.num_batches for share in shares]
    return PredictionLoop(trainer, module, shares).run(plan.gather)


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
    check_ranks_agree(trainer.strategy, facts_of_loaders(phase, loaders, trainer.use_distributed_sampler))
    seeds = agreed_order_seeds(trainer, loaders)
    if phase == "train":
        trainer.order_seed = seeds[0] = seeds[0] if order_seed is None else order_seed
    return [share_for(trainer, phase, loader, seed) for loader, seed in zip(loaders, seeds, strict=True)]

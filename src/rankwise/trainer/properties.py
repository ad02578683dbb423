"""What can be read off a `Trainer`: its arguments, the state of a stage, the process it runs in."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rankwise.errors import LifecycleError
from rankwise.trainer.loops.optimizers import OptimizerSet, SchedulerConfig
from rankwise.trainer.module import TrainingModule
from rankwise.trainer.state import Progress, StageState, TrainerState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.loggers import Logger
    from rankwise.strategies import Strategy
    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.loops.manual import ManualOptimization
    from rankwise.trainer.metrics.results import Results


def _forwarded(path: str) -> Any:
    """Return a property that reads and sets `path`, an attribute of a part of the Trainer."""
    part, _, name = path.rpartition(".")
    owner = operator.attrgetter(part)
    return property(operator.attrgetter(path), lambda trainer, value: setattr(owner(trainer), name, value))


def _read_only(path: str) -> Any:
    """Return a property that reads `path`; an assignment raises AttributeError."""
    return property(operator.attrgetter(path))


def _argument_only() -> Any:
    """Return a property for an argument of the constructor; to read and to assign it raise AttributeError."""
    return property()


def _in_phase(phase: str) -> Any:
    """Return a property that tells whether batches of `phase` run."""
    return property(lambda trainer: trainer._stage.phase == phase)


def _num_batches(phase: str) -> Any:
    """Return a property: how many batches this rank runs of each loader of `phase`."""
    return property(lambda trainer: trainer.state.num_batches.get(phase, []))


def _first(kind: type[Callback]) -> Any:
    """Return a property: the first callback of `kind`, or None."""
    return property(
        lambda trainer: next((item for item in trainer.callbacks if isinstance(item, kind)), None)
    )


class TrainerProperties:
    """The properties of a `Trainer`: most forward to one of its parts, which alone holds the value."""

    strategy: Strategy
    options: TrainerOptions
    callbacks: list[Callback]
    loggers: list[Logger]
    state: TrainerState
    _stage: StageState
    _optimizers: OptimizerSet
    _module: TrainingModule | None

    max_epochs: int | None = _forwarded("options.max_epochs")
    max_steps: int = _forwarded("options.max_steps")
    min_epochs: int = _forwarded("options.min_epochs")
    min_steps: int = _forwarded("options.min_steps")
    limit_train_batches: int | float = _forwarded("options.limit_train_batches")
    limit_val_batches: int | float = _forwarded("options.limit_val_batches")
    limit_test_batches: int | float = _forwarded("options.limit_test_batches")
    limit_predict_batches: int | float = _forwarded("options.limit_predict_batches")
    num_sanity_val_steps: int = _forwarded("options.num_sanity_val_steps")
    val_check_interval: int | float = _forwarded("options.val_check_interval")
    check_val_every_n_epoch: int | None = _forwarded("options.check_val_every_n_epoch")
    overfit_batches: int | float = _read_only("options.overfit_batches")
    accumulate_grad_batches: int = _forwarded("options.accumulate_grad_batches")
    gradient_clip_val: float = _forwarded("options.gradient_clip_val")
    gradient_clip_algorithm: str = _forwarded("options.gradient_clip_algorithm")
    on_nonfinite: str | None = _forwarded("options.on_nonfinite")
    deterministic: bool | str = _forwarded("options.deterministic")
    benchmark: bool | None = _forwarded("options.benchmark")
    detect_anomaly: bool = _forwarded("options.detect_anomaly")
    inference_mode: bool = _forwarded("options.inference_mode")
    use_distributed_sampler: bool = _forwarded("options.use_distributed_sampler")
    reload_dataloaders_every_n_epochs: int = _forwarded("options.reload_dataloaders_every_n_epochs")
    uneven_inputs: str = _forwarded("options.uneven_inputs")
    log_every_n_steps: int = _forwarded("options.log_every_n_steps")
    check_ranks_every_n_steps: int | None = _forwarded("options.check_ranks_every_n_steps")
    default_root_dir: str = _forwarded("options.default_root_dir")
    enable_autolog_hparams: bool = _forwarded("options.enable_autolog_hparams")
    fast_dev_run: int = _read_only("options.fast_dev_run")
    barebones: bool = _read_only("options.barebones")
    sync_batchnorm: bool = _read_only("strategy.sync_batchnorm")
    num_nodes: int = _read_only("strategy.num_nodes")
    accelerator, devices, precision = _argument_only(), _argument_only(), _argument_only()
    plugins, max_time = _argument_only(), _argument_only()
    enable_progress_bar, enable_checkpointing = _argument_only(), _argument_only()
    enable_model_summary, model_registry, profiler = _argument_only(), _argument_only(), _argument_only()

    progress: Progress = _forwarded("state.progress")
    seed: int = _forwarded("state.seed")
    order_seed: int = _forwarded("state.order_seed")
    gradient_order: list[int] = _forwarded("state.gradient_order")
    should_stop: bool = _forwarded("state.should_stop")
    ckpt_path: str | None = _forwarded("state.ckpt_path")
    callback_metrics: dict[str, Tensor] = _forwarded("state.metrics.callback")
    logged_metrics: dict[str, Tensor] = _forwarded("state.metrics.logged")
    has_validation: bool = _forwarded("state.has_validation")
    num_val_batches: list[float] = _num_batches("validate")
    num_test_batches: list[float] = _num_batches("test")
    num_predict_batches: list[float] = _num_batches("predict")

    optimizers: list[Optimizer] = _forwarded("_optimizers.optimizers")
    lr_scheduler_configs: list[SchedulerConfig] = _forwarded("_optimizers.schedulers")

    current_epoch: int = _read_only("progress.current_epoch")
    global_step: int = _read_only("progress.global_step")

    epoch_results: Results | None = _forwarded("_stage.epoch_results")
    running_manual_optimization: ManualOptimization | None = _forwarded("_stage.manual_optimization")
    is_validation_due: bool = _read_only("_stage.is_validation_due")
    training: bool = _in_phase("train")
    sanity_checking: bool = _read_only("_stage.is_sanity_check")
    testing: bool = _in_phase("test")
    predicting: bool = _in_phase("predict")

    world_size: int = _read_only("strategy.world_size")
    global_rank: int = _read_only("strategy.global_rank")
    local_rank: int = _read_only("strategy.local_rank")
    is_global_zero: bool = _read_only("strategy.is_global_zero")

    checkpoint_callback: ModelCheckpoint | None = _first(ModelCheckpoint)
    early_stopping_callback: EarlyStopping | None = _first(EarlyStopping)

    @property
    def validating(self) -> bool:
        """Whether batches of a validation run that is no sanity check."""
        return self._stage.phase == "validate" and not self.sanity_checking

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """How many batches of each validation loader this rank runs in the sanity check."""
        steps = self.options.num_sanity_val_steps
        return [number if steps == -1 else min(steps, number) for number in self.num_val_batches]

    @property
    def module(self) -> TrainingModule:
        """The module of the last stage."""
        if self._module is None:
            raise LifecycleError(
                call="Trainer.module",
                state="new",
                needed="a stage before it",
                remedy="trainer.fit(model, ...)",
            )
        return self._module

    @property
    def results(self) -> Results:
        """What is logged in the current loop."""
        if self._stage.results is None:
            raise LifecycleError(
                call="self.log()",
                state=self._stage.name or "no stage",
                needed="a loop that reduces metrics",
                remedy="log in the steps, or in hooks between on_train_start and on_train_end.",
            )
        return self._stage.results

    @property
    def manual_optimization(self) -> ManualOptimization:
        """What runs the steps of a module with `automatic_optimization = False`."""
        if self.running_manual_optimization is None:
            raise LifecycleError(
                call="a method of manual optimisation",
                state=self._stage.name or "no stage",
                needed="a fit of a module with automatic_optimization = False",
                remedy="set self.automatic_optimization = False in __init__.",
            )
        return self.running_manual_optimization

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The last values logged with `prog_bar=True`."""
        return {name: float(value) for name, value in self.state.metrics.progress_bar.items()}

    @property
    def num_training_batches(self) -> float:
        """How many batches of an epoch this rank runs; `inf` if unknown."""
        return sum(self.state.num_batches.get("train", ()))

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger."""
        return self.logger.log_dir if self.logger else None

    def batch_indices(self, dataloader_idx: int = 0) -> list[int] | None:
        """Return the positions, in the data set, of the samples of the batch that runs.

        They are known for a `DataLoader` that makes batches by indices, and yields them in order; None
        elsewhere, and outside of the loops.
        """
        shards = self._stage.shards.get(self._stage.phase or "", [])
        return shards[dataloader_idx].batch_indices if dataloader_idx < len(shards) else None

    @property
    def is_fitting(self) -> bool:
        """Whether `fit` runs, training or validating."""
        return self._stage.name == "fit"

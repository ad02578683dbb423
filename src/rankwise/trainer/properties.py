"""The read-only attributes of a `Trainer`: its arguments, the state of a stage, the process it runs in."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ProgressBar,
)
from rankwise.checks import check_value
from rankwise.compatibility.names import TRAINER_ATTRIBUTES, missing_attributes
from rankwise.errors import LifecycleError, MissingAttributeError
from rankwise.loggers import Logger
from rankwise.precision import Precision
from rankwise.strategies import Strategy
from rankwise.trainer.arguments import TrainerOptions
from rankwise.trainer.loops.manual import ManualOptimization
from rankwise.trainer.loops.optimizers import OptimizerSet, SchedulerConfig
from rankwise.trainer.metrics.results import Results
from rankwise.trainer.module import TrainingModule
from rankwise.trainer.state import Progress, StageState, TrainerState, TrainerStatus, read_only


def _forwarded(path: str) -> Any:
    """Return a property that reads and sets `path`, an attribute of a part of the Trainer."""
    part, _, name = path.rpartition(".")
    owner = operator.attrgetter(part)
    return property(operator.attrgetter(path), lambda trainer, value: setattr(owner(trainer), name, value))


def _in_phase(*phases: str) -> Any:
    """Return a property that tells whether batches of one of `phases` run."""
    return property(lambda trainer: trainer._stage.phase in phases)


def _of_phase(path: str, phase: str, default: Callable[[], Any] = lambda: None) -> Any:
    """Return a property that reads what the dictionary at `path` has for a phase."""
    read = operator.attrgetter(path)
    return property(lambda trainer: read(trainer).get(phase, default()))


def _first(kind: type[Callback]) -> Any:
    """Return a property: the first callback of `kind`, or None."""
    return property(
        lambda trainer: next((item for item in trainer.callbacks if isinstance(item, kind)), None)
    )


def _all(kind: type[Callback]) -> Any:
    """Return a property: the callbacks of `kind`."""
    return property(lambda trainer: [item for item in trainer.callbacks if isinstance(item, kind)])


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
    val_check_interval: int | float | timedelta = _forwarded("options.val_check_interval")
    check_val_every_n_epoch: int | None = _forwarded("options.check_val_every_n_epoch")
    overfit_batches: int | float = read_only("options.overfit_batches")
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
    fast_dev_run: int = read_only("options.fast_dev_run")
    barebones: bool = read_only("options.barebones")
    sync_batchnorm: bool = read_only("strategy.sync_batchnorm")
    num_nodes: int = read_only("strategy.num_nodes")
    precision: str = read_only("strategy.precision.name")
    precision_plugin: Precision = read_only("strategy.precision")
    accelerator: str = read_only("strategy.root_device.type")
    distributed_sampler_kwargs: dict[str, int] = read_only("strategy.distributed_sampler_kwargs")

    progress: Progress = _forwarded("state.progress")
    seed: int = _forwarded("state.seed")
    order_seed: int = _forwarded("state.order_seed")
    gradient_order: list[int] = _forwarded("state.gradient_order")
    should_stop: bool = _forwarded("state.should_stop")
    callback_metrics: dict[str, Tensor] = _forwarded("state.metrics.callback")
    logged_metrics: dict[str, Tensor] = _forwarded("state.metrics.logged")
    has_validation: bool = _forwarded("state.has_validation")
    enable_validation: bool = read_only("state.has_validation")
    # This rank's part of the last stage's loaders, in the given containers; None in other processes:
    train_dataloader: Any = _of_phase("_stage.loaders", "train")
    val_dataloaders: Any = _of_phase("_stage.loaders", "validate")
    test_dataloaders: Any = _of_phase("_stage.loaders", "test")
    predict_dataloaders: Any = _of_phase("_stage.loaders", "predict")
    # How many batches of each loader this rank runs:
    num_val_batches: list[float] = _of_phase("state.num_batches", "validate", list)
    num_test_batches: list[float] = _of_phase("state.num_batches", "test", list)
    num_predict_batches: list[float] = _of_phase("state.num_batches", "predict", list)

    optimizers: list[Optimizer] = _forwarded("_optimizers.created.optimizers")
    lr_scheduler_configs: list[SchedulerConfig] = _forwarded("_optimizers.created.schedulers")

    # Of the last stage; None before the first:
    lightning_module: TrainingModule | None = read_only("_module")
    current_epoch: int = read_only("progress.current_epoch")
    global_step: int = read_only("progress.global_step")

    epoch_results: Results | None = _forwarded("_stage.epoch_results")
    running_manual_optimization: ManualOptimization | None = _forwarded("_stage.manual_optimization")
    is_validation_due: bool = read_only("_stage.is_validation_due")
    training: bool = _in_phase("train")
    sanity_checking: bool = read_only("_stage.is_sanity_check")
    is_last_batch: bool = read_only("_stage.is_last_batch")
    is_padding_step: bool = read_only("_stage.is_padding_step")
    received_sigterm: bool = read_only("state.received_sigterm")
    testing: bool = _in_phase("test")
    predicting: bool = _in_phase("predict")
    evaluating: bool = _in_phase("validate", "test")

    world_size: int = read_only("strategy.world_size")
    global_rank: int = read_only("strategy.global_rank")
    local_rank: int = read_only("strategy.local_rank")
    node_rank: int = read_only("strategy.node_rank")
    num_devices: int = read_only("strategy.local_world_size")
    is_global_zero: bool = read_only("strategy.is_global_zero")

    checkpoint_callback: ModelCheckpoint | None = _first(ModelCheckpoint)
    checkpoint_callbacks: list[ModelCheckpoint] = _all(ModelCheckpoint)
    early_stopping_callback: EarlyStopping | None = _first(EarlyStopping)
    early_stopping_callbacks: list[EarlyStopping] = _all(EarlyStopping)
    progress_bar_callback: ProgressBar | None = _first(ProgressBar)

    vars().update(missing_attributes("Trainer", TRAINER_ATTRIBUTES))

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the last stage has loaded; None without one."""
        return self.state.ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: object) -> None:
        raise MissingAttributeError(
            owner="Trainer",
            attribute="ckpt_path that can be assigned",
            remedy=f"trainer.fit(model, ckpt_path={path!r}).",
        )

    @property
    def scaler(self) -> Any:
        """Torch's `GradScaler` of a precision that scales losses, once it has; otherwise None."""
        return getattr(self.strategy.precision, "scaler", None)

    @property
    def validating(self) -> bool:
        """Whether batches of a validation run, other than the sanity check."""
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
                "Trainer.module", state="new", needed="a stage before it", remedy="trainer.fit(model, ...)"
            )
        return self._module

    @property
    def manual_optimization(self) -> ManualOptimization:
        """Runs the steps of a module with `automatic_optimization = False`."""
        if self.running_manual_optimization is None:
            raise LifecycleError(
                "a method of manual optimisation",
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
        """How many batches of an epoch this rank runs; `inf` if unknown.

        Collective in `configure_optimizers`, where the first look asks for the training data.
        """
        if self._stage.load_train_data is not None:
            self._stage.load_train_data()
        return sum(self.state.num_batches.get("train", (math.inf,)))

    @property
    def estimated_stepping_batches(self) -> float:
        """How many optimizer steps `fit` takes in all, without an early stop; `inf` if that is unknown.

        In manual optimisation, the number of training batches. For learning rate schedulers, in
        `configure_optimizers` or later. Collective within a fit.
        """
        epochs, max_steps = self.options.epoch_limit, self.options.max_steps
        limit = math.inf if max_steps == -1 else max_steps
        batches = math.inf if epochs == -1 else self._agreed_num_batches()
        if math.isinf(batches):
            return limit
        schedulers = [each for each in self.callbacks if isinstance(each, GradientAccumulationScheduler)]
        if schedulers:
            steps = sum(math.ceil(batches / schedulers[0].accumulation_in(epoch)) for epoch in range(epochs))
        else:
            steps = math.ceil(batches / self.options.accumulate_grad_batches) * epochs
        return min(steps, limit)

    def _agreed_num_batches(self) -> float:
        """Return how many batches of an epoch the ranks run, which may have different numbers of them."""
        own, policy = self.num_training_batches, self.options.uneven_inputs
        if policy == "error" or self.world_size == 1 or self._stage.name != "fit":
            return own
        numbers = self.strategy.all_gather_object(own)
        return min(numbers) if policy == "truncate" else max(numbers)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str:
        """The folder of the first logger; `default_root_dir` if it has none."""
        return (self.logger and self.logger.log_dir) or self.default_root_dir

    @property
    def model(self) -> nn.Module | None:
        """The module as the strategy has wrapped it, within a fit; otherwise the module of the last stage."""
        return self._module if self._stage.wrapped is None else self._stage.wrapped

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices of this node's processes; 0, 1, ... on the CPU."""
        devices = self.strategy.placement.devices
        return [position if device.type == "cpu" else device.index for position, device in enumerate(devices)]

    @property
    def interrupted(self) -> bool:
        """Whether the last stage has ended with an exception."""
        return self.state.status == TrainerStatus.INTERRUPTED

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on local rank 0 of each node; takes the arguments of `print`."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201  what the method is for

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create a module's parameters in the block as training keeps them, in the precision's dtype.

        With a mixed precision they have 32 bits. They are on this process's device, or on the CPU if other
        processes train: these get a copy.

        Raises:
            InvalidArgumentError: for `empty_init=True`: parameters are always initialised.
        """
        check_value("empty_init", empty_init, not empty_init, "None or False: parameters are initialised")
        device = self.strategy.root_device if self.strategy.runs_in_caller else torch.device("cpu")
        with device, self.strategy.precision.module_init_context():
            yield

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

"""`TrainerState`: what a Trainer's user reads of it, and the loops' progress."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rankwise.errors import LifecycleError
from rankwise.trainer.arguments import check_whole
from rankwise.trainer.loops.optimizers import SchedulerConfig, configure
from rankwise.trainer.metrics import Reported, Results

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from rankwise.loggers import Logger
    from rankwise.strategies import Strategy
    from rankwise.trainer.loops.manual import ManualOptimization
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.stages import StageName

__all__ = ["Progress", "TrainerState"]


@final
@dataclass
class Progress:
    """Where in the training data, and at which optimizer step, a fit is.

    Attributes:
        current_epoch: completed epochs; within an epoch, its number.
        global_step: optimizer steps made.
        batches_done: batches of the current epoch that this rank has trained on.
        samples_done: what all ranks together have taken of the current epoch's stream of indices; another
            number of ranks goes on from the same place.
        window_batches: how many of those belong to an accumulation window that has not ended: their gradients
            are not in the weights yet.
        window_samples: the samples of those batches.
        is_epoch_done: whether those were all of them; from then on until the next epoch begins.
        is_validated: whether the validation that was due after the last batch has been run.
        is_epoch_closed: whether the epoch's hooks and metrics have ended, be it at its end or cut short.
    """

    current_epoch: int = 0
    global_step: int = 0
    batches_done: int = 0
    samples_done: int = 0
    window_batches: int = 0
    window_samples: int = 0
    is_epoch_done: bool = False
    is_validated: bool = False
    is_epoch_closed: bool = False

    def begin_epoch(self) -> None:
        """Start the current epoch at its first batch."""
        self.batches_done = self.samples_done = self.window_batches = self.window_samples = 0
        self.is_epoch_done = self.is_validated = self.is_epoch_closed = False

    def end_batch(self, is_last: bool, samples: int = 0, is_window_end: bool = True) -> None:
        """Count a batch of the current epoch, for which the ranks took that many `samples`."""
        self.batches_done += 1
        self.samples_done += samples
        self.window_batches = 0 if is_window_end else self.window_batches + 1
        self.window_samples = 0 if is_window_end else self.window_samples + samples
        self.is_epoch_done = is_last
        self.is_validated = self.is_epoch_closed = False

    def repeat_window(self) -> None:
        """Go back to the first batch of a window that was cut short: its gradients are gone."""
        if self.window_batches:
            self.batches_done -= self.window_batches
            self.samples_done -= self.window_samples
            self.window_batches = self.window_samples = 0
            self.is_validated = True  # before that batch, if it was due

    def end_epoch(self) -> None:
        """Go on to the next epoch, if this one is done; one that was cut short goes on later."""
        if self.is_epoch_done:
            self.current_epoch += 1
            self.begin_epoch()

    @property
    def is_within_epoch(self) -> bool:
        """Whether some of the current epoch's batches are done."""
        return self.batches_done > 0

    @property
    def is_epoch_open(self) -> bool:
        """Whether an epoch was begun whose hooks and metrics have not ended yet."""
        return self.is_within_epoch and not self.is_epoch_closed


_DEFAULT_MAX_EPOCHS = 1000


class TrainerState:
    """The part of `Trainer` that loops, hooks, callbacks and modules ask."""

    FACTS: ClassVar = (
        "progress",
        "seed",
        "order_seed",
        "gradient_order",
        "should_stop",
        "callback_metrics",
        "logged_metrics",
        "has_validation",
        "num_training_batches",
        "num_val_batches",
        "num_test_batches",
        "num_predict_batches",
        "_progress_bar_metrics",
    )
    """The attributes that come back from another process."""

    strategy: Strategy
    callbacks: list[Callback]
    loggers: list[Logger]
    min_epochs: int
    on_nonfinite: str | None

    def __init__(self) -> None:
        self._max_epochs: int | None = None
        self._max_steps = -1
        self._forget_fit()
        self._forget_stage()

    def _forget_fit(self) -> None:
        """Forget the last fit."""
        self._module: TrainingModule | None = None
        self._fitted_module: TrainingModule | None = None
        self.ckpt_path: str | None = None
        self.progress = Progress()
        self.seed = self.order_seed = 0
        self.gradient_order: list[int] = []
        self.should_stop = False
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self._pending_states: tuple[list[Any], list[Any]] | None = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics: dict[str, Tensor] = {}
        self._progress_bar_metrics: dict[str, Tensor] = {}
        self.has_validation = False
        self.num_training_batches: float = 0
        self.num_val_batches: list[float] = []
        self.num_test_batches: list[float] = []
        self.num_predict_batches: list[float] = []

    def _forget_stage(self) -> None:
        self._stage: StageName | None = None
        self._phase: str | None = None
        self._results: Results | None = None
        self.epoch_results: Results | None = None
        self.running_manual_optimization: ManualOptimization | None = None

    # ------------------------------------------------------------------ within a stage

    @contextlib.contextmanager
    def in_phase(self, phase: str, results: Results) -> Iterator[None]:
        """Train, validate, test or predict, and let the module log into `results` meanwhile."""
        before = self._phase, self._results
        self._phase, self._results = phase, results
        try:
            yield
        finally:
            self._phase, self._results = before

    def publish(self, values: list[Reported], *, is_logged: bool) -> None:
        """Show metrics to callbacks and the progress bar, and with `is_logged` to the loggers."""
        for value in values:
            self.callback_metrics[value.name] = self.callback_metrics[value.base_name] = value.value
            if value.prog_bar:
                self._progress_bar_metrics[value.name] = value.value
        logged = {value.name: value.value for value in values if value.logger}
        if is_logged and logged:
            self.logged_metrics.update(logged)
            self._send_to_loggers({name: float(value) for name, value in logged.items()})

    def _send_to_loggers(self, numbers: dict[str, float]) -> None:
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics({"epoch": self.current_epoch, **numbers}, self.global_step)

    def create_optimizers(self) -> None:
        """Make the module's optimizers and schedulers, or keep those of the fit that goes on.

        Either way their state is what the last fit left, on the device where the parameters are now.
        """
        states = self._optimizer_states()
        if not self.optimizers:
            self.optimizers, self.lr_scheduler_configs = configure(self.module)
        self.strategy.precision.configure(self.module, self.optimizers)
        if states is not None:
            self.load_optimizer_states(*states)
        self._pending_states = None

    def whole_states(self) -> tuple[list[Any], list[Any]]:
        """Return the whole states of optimizers and schedulers; those kept for ones that are not here too.

        Collective: within a stage, every rank must call this.
        """
        if not self.optimizers and self._pending_states is not None:
            return self._pending_states
        optimizers = [self.strategy.get_optimizer_state(optimizer) for optimizer in self.optimizers]
        return optimizers, [config.scheduler.state_dict() for config in self.lr_scheduler_configs]

    def keep_optimizer_states(self, optimizers: list[Any], schedulers: list[Any]) -> None:
        """Keep the states for optimizers that cannot exist in this process."""
        self.optimizers, self.lr_scheduler_configs = [], []
        self._pending_states = optimizers, schedulers

    def load_optimizer_states(self, optimizers: list[Any], schedulers: list[Any]) -> None:
        """Give optimizers and schedulers their states.

        Raises:
            ValueError: when they do not fit.
        """
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)
        for config, state in zip(self.lr_scheduler_configs, schedulers, strict=True):
            config.scheduler.load_state_dict(state)

    @property
    def is_done(self) -> bool:
        """Whether training has reached its end, or this rank wants it to."""
        return self.is_at_limit or self.wants_to_stop

    @property
    def is_at_limit(self) -> bool:
        """Whether training has reached `max_steps` or `max_epochs`: the same on all ranks."""
        return 0 <= self.max_steps <= self.global_step or 0 <= self._epoch_limit <= self.current_epoch

    @property
    def wants_to_stop(self) -> bool:
        """Whether `should_stop` is set on this rank, and `min_epochs` are done."""
        return self.should_stop and self.current_epoch + self.progress.is_epoch_done >= self.min_epochs

    def warn_if_done(self) -> bool:
        """Return whether there is nothing left to train, and say so."""
        if self.is_done and self.is_global_zero:
            remedy = (
                "raise trainer.max_epochs or trainer.max_steps"
                if self.is_at_limit
                else "give what has stopped it other limits, EarlyStopping or max_time, or leave it out"
            )
            warnings.warn(
                f"Nothing to train: epoch {self.current_epoch} of max_epochs={self.max_epochs}, step "
                f"{self.global_step} of max_steps={self.max_steps}. To go on, {remedy}.",
                stacklevel=3,
            )
        return self.is_done

    # ------------------------------------------------------------------ facts

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
        if self._results is None:
            raise LifecycleError(
                call="self.log()",
                state=self._stage or "no stage",
                needed="a loop that runs",
                remedy="log in the steps, or in hooks between on_train_start and on_train_end.",
            )
        return self._results

    @results.setter
    def results(self, results: Results) -> None:
        self._results = results

    @property
    def manual_optimization(self) -> ManualOptimization:
        """What runs the steps of a module with `automatic_optimization = False`."""
        if self.running_manual_optimization is None:
            raise LifecycleError(
                call="a method of manual optimisation",
                state=self._stage or "no stage",
                needed="a fit of a module with automatic_optimization = False",
                remedy="set self.automatic_optimization = False in __init__.",
            )
        return self.running_manual_optimization

    @property
    def max_epochs(self) -> int | None:
        """After how many epochs to stop; may be raised between fits."""
        return self._max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._max_epochs = None if value is None else check_whole("max_epochs", value, 0, also=-1)

    @property
    def max_steps(self) -> int:
        """After how many optimizer steps to stop; may be raised between fits."""
        return self._max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._max_steps = check_whole("max_steps", value, 0, also=-1)

    @property
    def _epoch_limit(self) -> int:
        if self._max_epochs is None:
            return _DEFAULT_MAX_EPOCHS if self.max_steps == -1 else -1
        return self._max_epochs

    @property
    def current_epoch(self) -> int:
        """Completed epochs; within an epoch, its number."""
        return self.progress.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps made."""
        return self.progress.global_step

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The last values logged with `prog_bar=True`."""
        return {name: float(value) for name, value in self._progress_bar_metrics.items()}

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger."""
        return self.logger.log_dir if self.logger else None

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint`."""
        return next((callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first `EarlyStopping`."""
        return next((callback for callback in self.callbacks if isinstance(callback, EarlyStopping)), None)

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        """This process's id in the whole job."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """This process's id on its node."""
        return self.strategy.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is global rank 0, or the process that stands for it."""
        return self.strategy.is_global_zero

    @property
    def is_fitting(self) -> bool:
        """Whether `fit` runs, be it training or validating."""
        return self._stage == "fit"

    @property
    def training(self) -> bool:
        """Whether training batches run."""
        return self._phase == "train"

    @property
    def validating(self) -> bool:
        """Whether validation batches run, in `fit` or `validate`."""
        return self._phase == "validate"

    @property
    def testing(self) -> bool:
        """Whether test batches run."""
        return self._phase == "test"

    @property
    def predicting(self) -> bool:
        """Whether batches to predict run."""
        return self._phase == "predict"

    # ------------------------------------------------------------------ travelling

    def __getstate__(self) -> dict[str, Any]:
        """Travel without strategy and module, which travel by themselves, and with optimizers as states."""
        return {
            **self.__dict__,
            "strategy": None,
            "_module": None,
            "_fitted_module": None,
            "optimizers": [],
            "lr_scheduler_configs": [],
            "_pending_states": self._optimizer_states(),
        }

    def _optimizer_states(self) -> tuple[list[Any], list[Any]] | None:
        """Return the states that the last fit left, be it in this process or in one that sent them."""
        if not self.optimizers:
            return self._pending_states
        schedulers = [config.scheduler.state_dict() for config in self.lr_scheduler_configs]
        return [optimizer.state_dict() for optimizer in self.optimizers], schedulers

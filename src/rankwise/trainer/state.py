"""The mutable state of a Trainer, and `LoopContext`: what stages and loops use of the Trainer."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, final

from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.callbacks import Callback
from rankwise.errors import LifecycleError
from rankwise.loggers import Logger
from rankwise.profilers import Profiler
from rankwise.ranks import warn
from rankwise.seed import RandomStreams, mixed_seed, seed_process
from rankwise.strategies import Strategy
from rankwise.trainer.data import DataModule
from rankwise.trainer.hooks import Hooks
from rankwise.trainer.loops.optimizers import SchedulerConfig
from rankwise.trainer.metrics.results import Reported, Results

StageName = Literal["fit", "validate", "test", "predict"]


def read_only(path: str) -> Any:
    """Return a property that reads `path`, an attribute of a part; an assignment raises AttributeError."""
    return property(operator.attrgetter(path))


class _Named(str, Enum):
    """Members equal their values, and are printed as these."""

    __str__ = str.__str__


@final
class TrainerFn(_Named):
    """A method of a Trainer; a member equals its value."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


@final
class RunningStage(_Named):
    """The current stage of a Trainer; a member equals its value."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is an evaluation with metrics."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


@final
class TrainerStatus(_Named):
    """How far the last stage of a Trainer is; a member equals its value."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the stage has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


@final
@dataclass
class Progress:
    """The position of a fit: its epoch, its optimizer step, and how much of the epoch's data is done."""

    current_epoch: int = 0  # completed epochs; within an epoch, its number
    global_step: int = 0  # completed optimizer steps
    batches_done: int = 0  # batches of the current epoch that this rank has trained on
    # Items of the epoch's index stream that all ranks together have used: a run with another number of ranks
    # continues from the same item.
    samples_done: int = 0
    total_batches: int = 0  # batches of all epochs that this rank has trained on
    window_batches: int = 0  # of `batches_done`, in an unfinished accumulation window: not in the weights yet
    window_samples: int = 0  # the samples of those batches
    is_epoch_begun: bool = False  # whether its start hooks have run; a resumed run does not run them again
    is_epoch_done: bool = False  # whether all batches of the epoch are done; until the next epoch begins
    is_validated: bool = False  # whether the validation that was due after the last batch has run
    is_epoch_closed: bool = False  # whether end hooks ran and metrics were published, also if stopped early
    # Completed accumulation windows, which number what loggers get, from 0 on; other than `global_step` where
    # a window steps several optimizers.
    counted_steps: int = 0

    def begin_epoch(self) -> None:
        """Start the current epoch at its first batch."""
        self.batches_done = self.samples_done = self.window_batches = self.window_samples = 0
        self.is_epoch_done = self.is_validated = self.is_epoch_closed = False

    def end_batch(self, is_last: bool, samples: int = 0, is_window_end: bool = True) -> None:
        """Count a batch of the current epoch, for which the ranks together used `samples` items."""
        self.batches_done += 1
        self.total_batches += 1
        self.counted_steps += is_window_end
        self.samples_done += samples
        self.window_batches = 0 if is_window_end else self.window_batches + 1
        self.window_samples = 0 if is_window_end else self.window_samples + samples
        self.is_epoch_done = is_last
        self.is_validated = self.is_epoch_closed = False

    def skip_rest(self) -> None:
        """End the epoch's data before its last batch; an unfinished window is lost."""
        self.window_batches = self.window_samples = 0
        self.is_epoch_done = True

    def repeat_window(self) -> None:
        """Go back to the first batch of an unfinished window, as its gradients are lost."""
        if self.window_batches:
            self.batches_done -= self.window_batches
            self.total_batches -= self.window_batches
            self.samples_done -= self.window_samples
            self.window_batches = self.window_samples = 0
            self.is_validated = True  # a validation due before that batch has run

    def end_epoch(self) -> None:
        """Start the next epoch if this one is done; an epoch that was stopped early continues later."""
        if self.is_epoch_done:
            self.current_epoch += 1
            self.is_epoch_begun = False
            self.begin_epoch()

    def position(self) -> tuple[int, int]:
        """Return numbers that are the same on all ranks, and others after each batch."""
        return self.current_epoch, self.total_batches

    @property
    def is_possible(self) -> bool:
        """Whether the numbers agree with each other."""
        has_whole_window = (
            self.window_batches <= self.batches_done and self.window_samples <= self.samples_done
        )
        return has_whole_window and (self.batches_done > 0 or self.samples_done == 0)

    @property
    def is_within_epoch(self) -> bool:
        """Whether some of the current epoch's batches are done."""
        return self.batches_done > 0

    @property
    def is_epoch_open(self) -> bool:
        """Whether an epoch has begun and is not closed."""
        return self.is_within_epoch and not self.is_epoch_closed


@final
@dataclass
class PublishedMetrics:
    """The last values of all metrics of a stage: for callbacks, loggers and the progress bar."""

    callback: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    progress_bar: dict[str, Tensor] = field(default_factory=dict)


@final
@dataclass
class TrainerState:
    """The state that a Trainer keeps between stages, and that a worker sends back; `Trainer` documents it."""

    progress: Progress = field(default_factory=Progress)
    seed: int = 0
    order_seed: int = 0
    gradient_order: list[int] = field(default_factory=list)
    first_trained: list[str] | None = None  # the parameters that required a gradient when the run began here
    should_stop: bool = False
    ckpt_path: str | None = None
    metrics: PublishedMetrics = field(default_factory=PublishedMetrics)  # of the last stage
    fit_metrics: PublishedMetrics = field(default_factory=PublishedMetrics)
    has_validation: bool = False
    num_batches: dict[str, list[float]] = field(default_factory=dict)  # of each loader of a phase
    fn: TrainerFn | None = None  # the last stage
    stage: RunningStage | None = None  # of the stage that runs
    status: TrainerStatus = TrainerStatus.INITIALIZING
    received_sigterm: bool = False  # in the last stage
    process_seed: int = 0  # rank 0's `torch.initial_seed()` when the run began
    rank_states: list[dict[str, Any]] = field(default_factory=list)  # what each rank needs after the last fit
    # How many batches of each loader have logged by step, by the kind of evaluation.
    evaluated_batches: dict[str, dict[int, int]] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the last stage has ended without an exception."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last stage has ended."""
        return self.status.stopped

    @contextlib.contextmanager
    def running(self, name: StageName) -> Iterator[None]:
        """Set `fn`, and `stage` and `status` while the block runs and after it."""
        self.fn, self.status, self.received_sigterm = TrainerFn(name), TrainerStatus.RUNNING, False
        self.stage = RunningStage("train" if name == "fit" else name)
        try:
            yield
        except BaseException:
            self.end(TrainerStatus.INTERRUPTED)
            raise
        self.end(TrainerStatus.FINISHED)

    def end(self, status: TrainerStatus) -> None:
        """Note how a stage has ended."""
        self.stage, self.status = None, status

    def begin_stage(self, name: StageName) -> None:
        """Forget the metrics of the stage before; a fit that continues keeps its own."""
        self.metrics = self.fit_metrics if name == "fit" else PublishedMetrics()


@final
@dataclass
class StageState:
    """The stage that runs now, and what its metrics are logged to; all defaults outside of stages."""

    name: StageName | None = None
    phase: str | None = None  # "train", "validate", "test" or "predict"; None outside of the loops
    results: Results | None = None  # where the module logs to; None outside of the loops, and in prediction
    epoch_results: Results | None = None  # logged in the current training epoch so far
    is_sanity_check: bool = False
    is_validation_due: bool = False  # whether a validation follows the training batch that runs, or has ended
    is_last_batch: bool = False  # of the training epoch
    compared_at: int = -1  # `Progress.total_batches` when the ranks were last compared
    wrapped: nn.Module | None = None  # the module as the strategy wrapped it, within a fit
    load_train_data: Callable[[], object] | None = None  # until `fit` has set `num_batches`
    before_validation: dict[str, Any] | None = None  # this rank's part of a checkpoint saved in a validation
    manual_optimization: Any = None
    schedule: Any = None  # the `BatchSchedule` of the training batches
    random: RandomStreams = field(default_factory=RandomStreams)  # in which hooks draw the same on all ranks
    datamodule: DataModule | None = None  # that this stage was given; the Trainer's may be an earlier one
    loaders: dict[str, Any] = field(default_factory=dict)  # of each phase, split; also after the stage
    loaded_epochs: dict[str, int] = field(default_factory=dict)  # when the loaders of a phase were made
    shards: dict[str, list[Any]] = field(default_factory=dict)  # this rank's `LoaderShard`s of each phase

    @property
    def open_results(self) -> Results:
        """The values that are logged in the current loop; a `LifecycleError` outside of one."""
        if self.results is None:
            raise LifecycleError(
                "self.log()",
                state=self.name or "no stage",
                needed="a loop that reduces metrics",
                remedy="log in the steps, or in hooks between on_train_start and on_train_end.",
            )
        return self.results

    @property
    def is_padding_step(self) -> bool:
        """Whether this rank repeats a training batch, at a weight of 0, because it has no more."""
        return self.phase == "train" and self.schedule is not None and bool(self.schedule.is_padding)


def seed_rank(strategy: Strategy, seed: int, global_step: int) -> None:
    """Seed this rank's random generators with a number that depends on the seed, the step and the rank."""
    seed_process(mixed_seed(seed, global_step, strategy.global_rank), strategy.root_device)


@final
class LoopContext:
    """The part of a Trainer that stages, loops and checkpoints use, for one module on this rank."""

    # A callback may replace these lists:
    callbacks: list[Callback] = read_only("trainer.callbacks")
    loggers: list[Logger] = read_only("trainer.loggers")
    optimizers: list[Optimizer] = read_only("optimizer_set.optimizers")
    schedulers: list[SchedulerConfig] = read_only("optimizer_set.schedulers")
    profiler: Profiler = read_only("trainer.profiler")
    datamodule: DataModule | None = read_only("trainer.datamodule")  # the last that a stage was given

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.trainer = trainer = hooks.trainer
        self.strategy = trainer.strategy
        self.module = hooks.module
        self.wrapped: nn.Module = hooks.module  # as the strategy wraps it in a fit
        self.options = trainer.options  # a callback may change them between two batches
        self.state = trainer.state
        self.stage = trainer._stage
        self.optimizer_set = trainer._optimizers

    def part_streams(self, seed: int) -> None:
        """Begin a random stream of this rank for forward, backward and data, if there are several ranks.

        In hooks and optimizers all ranks draw the same numbers.
        """
        strategy, progress = self.strategy, self.state.progress
        if strategy.world_size == 1:
            return
        seed_rank(strategy, seed, progress.global_step)
        self.stage.random.part(seed, strategy.root_device, progress.position)

    @property
    def has_validation_in_epoch(self) -> bool:
        """Whether `check_val_every_n_epoch` has validations in the current epoch."""
        every = self.options.check_val_every_n_epoch
        return every is None or (self.state.progress.current_epoch + 1) % every == 0

    def show_so_far(self, results: Results, hook: str) -> None:
        """Show the values logged by epoch to the hook at its end, if a rank has one. Collective."""
        is_read = self.hooks.is_before_metrics(hook)
        values = results.values_so_far(self.strategy, is_read=is_read)
        if is_read:
            self.publish(values)

    def publish(self, values: Iterable[Reported], logged: Iterable[Reported] = ()) -> None:
        """Show metrics to callbacks and the progress bar, and those in `logged` to rank 0's loggers."""
        metrics, progress = self.state.metrics, self.state.progress
        for value in values:
            metrics.callback[value.name] = metrics.callback[value.base_name] = value.value
            if value.prog_bar:
                metrics.progress_bar[value.name] = value.value
            if value.logger:
                metrics.logged[value.name] = value.value
        step = progress.counted_steps - (1 if self.stage.name == "fit" else 0)
        numbers = {value.name: value.value for value in logged if value.logger}
        self.log(numbers, max(0, step), {"epoch": progress.current_epoch})

    def log(self, values: Mapping[str, Tensor], step: int, others: Mapping[str, float] | None = None) -> None:
        """Give values, if there are any, to rank 0's loggers, with `others`; one named "step" replaces it."""
        if not values:
            return
        self.state.metrics.logged.update(values)
        numbers = {**(others or {}), **{name: float(value) for name, value in values.items()}}
        step = int(numbers.pop("step", step))
        for logger in self.loggers if self.strategy.is_global_zero else ():
            logger.log_metrics(dict(numbers), step)

    @contextlib.contextmanager
    def in_phase(self, phase: str, results: Results | None) -> Iterator[None]:
        """Set the phase, and log into `results`, in the block."""
        state, stage = self.state, self.stage
        before = stage.phase, stage.results, state.stage
        stage.phase, stage.results = phase, results
        state.stage = RunningStage("sanity_check" if stage.is_sanity_check else phase)
        try:
            yield
        finally:
            stage.phase, stage.results, state.stage = before

    @property
    def is_at_limit(self) -> bool:
        """Whether training has reached `max_steps` or `max_epochs`: the same on all ranks."""
        options, progress = self.options, self.state.progress
        is_at_max_steps = 0 <= options.max_steps <= progress.global_step
        return is_at_max_steps or 0 <= options.epoch_limit <= progress.current_epoch

    @property
    def wants_to_stop(self) -> bool:
        """Whether `should_stop` is set on this rank, and `min_epochs` and `min_steps` are done."""
        if not self.state.should_stop:
            return False
        progress, options = self.state.progress, self.options
        has_min_epochs = progress.current_epoch + progress.is_epoch_done >= options.min_epochs
        return has_min_epochs and progress.global_step >= options.min_steps

    def warn_if_done(self) -> bool:
        """Warn if there is nothing left to train, and return whether that is so."""
        is_done = self.is_at_limit or self.wants_to_stop
        if is_done and self.strategy.is_global_zero:
            remedy = "change the limits of EarlyStopping or max_time, which stopped training, or remove them"
            if self.is_at_limit:
                remedy = "raise trainer.max_epochs or trainer.max_steps"
            options, progress = self.options, self.state.progress
            warn(
                f"Nothing to train: epoch {progress.current_epoch} of max_epochs={options.max_epochs}, step "
                f"{progress.global_step} of max_steps={options.max_steps}. To continue, {remedy}.",
            )
        return is_done

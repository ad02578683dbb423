"""`LoopContext`: what the loops of a stage use of the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.hooks import Hooks
    from rankwise.trainer.loops.optimizers import SchedulerConfig
    from rankwise.trainer.metrics import Reported, Results
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.state import Progress

__all__ = ["LoopContext", "LoopSettings", "MetricsLog", "StopState"]


class LoopSettings(Protocol):
    """The Trainer's arguments that loops read. A callback may change them between two batches."""

    accumulate_grad_batches: int
    check_val_every_n_epoch: int
    gradient_clip_algorithm: str
    gradient_clip_val: float
    log_every_n_steps: int
    on_nonfinite: str | None
    uneven_inputs: str
    val_check_interval: int | float


class MetricsLog(Protocol):
    """Where loops put what the module logs."""

    callback_metrics: dict[str, Tensor]
    results: Results
    epoch_results: Results | None

    def in_phase(self, phase: str, results: Results) -> AbstractContextManager[None]:
        """Set the phase, and log into `results`, in the block."""

    def publish(self, values: list[Reported], *, is_logged: bool) -> None:
        """Show metrics to callbacks and the progress bar, and with `is_logged` to the loggers."""


class StopState(Protocol):
    """When training stops."""

    should_stop: bool

    @property
    def is_at_limit(self) -> bool:
        """Whether training has reached `max_steps` or `max_epochs`: the same on all ranks."""

    @property
    def wants_to_stop(self) -> bool:
        """Whether `should_stop` is set on this rank, and `min_epochs` are done."""

    def warn_if_done(self) -> bool:
        """Warn if there is nothing left to train, and return whether that is so."""


@final
@dataclass
class LoopContext:
    """What the loops of a stage use of the Trainer, on this rank.

    Attributes:
        strategy: the strategy, with its process group set up.
        module: the user's module.
        wrapped: the module as the strategy wrapped it; in evaluation, the module itself.
        optimizers: the optimizers; none in evaluation.
        schedulers: the learning rate schedulers, and when they step.
        progress: the position in the training data.
        seed: rank 0's seed.
        gradient_order: the trainable parameters' numbers, in the order in which a backward pass reaches them.
        hooks: calls the hooks of callbacks and module.
        metrics: takes what is logged.
        settings: the Trainer's arguments.
        stop: when training stops.
        save_stop_checkpoint: writes the checkpoint from which a stopped fit continues. None saves nothing.
    """

    strategy: Strategy
    module: TrainingModule
    wrapped: nn.Module
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    progress: Progress
    seed: int
    gradient_order: list[int]
    hooks: Hooks
    metrics: MetricsLog
    settings: LoopSettings
    stop: StopState
    save_stop_checkpoint: Callable[[], None] | None

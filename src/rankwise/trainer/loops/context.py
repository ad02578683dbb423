"""`LoopContext`: what the loops of a stage use of the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.hooks import Hooks
    from rankwise.trainer.loops.optimizers import SchedulerConfig
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.options import TrainerOptions
    from rankwise.trainer.state import StageState, StopCondition, TrainerState

__all__ = ["LoopContext"]


@final
@dataclass
class LoopContext:
    """What the loops of a stage use of the Trainer, on this rank.

    Attributes:
        strategy: the strategy, with its process group set up.
        module: the user's module.
        wrapped: the module as the strategy wrapped it; in evaluation, the module itself.
        optimizers: the fit's optimizers.
        schedulers: the fit's learning rate schedulers, and when they step.
        state: the progress of the fit, and the last values of all metrics.
        hooks: calls the hooks of callbacks and module.
        metrics: takes what is logged.
        settings: the Trainer's arguments. A callback may change them between two batches.
        stop: when training stops.
        save_stop_checkpoint: writes the checkpoint from which a stopped fit continues. None saves nothing.
    """

    strategy: Strategy
    module: TrainingModule
    wrapped: nn.Module
    optimizers: list[Optimizer]
    schedulers: list[SchedulerConfig]
    state: TrainerState
    hooks: Hooks
    metrics: StageState
    settings: TrainerOptions
    stop: StopCondition
    save_stop_checkpoint: Callable[[], None] | None

"""`LoopContext`: what the loops of a stage use of the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.arguments import TrainerOptions
    from rankwise.trainer.hooks import Hooks
    from rankwise.trainer.loops.optimizers import OptimizerSet, SchedulerConfig
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.state import StageState, StopCondition, TrainerState


@final
@dataclass
class LoopContext:
    """What the loops of a stage use of the Trainer, on this rank.

    Attributes:
        wrapped: the module as the strategy wrapped it; in evaluation, the module itself.
        settings: the Trainer's arguments. A callback may change them between two batches.
        save_stop_checkpoint: writes the checkpoint from which a stopped fit continues. None saves nothing.
    """

    strategy: Strategy
    module: TrainingModule
    wrapped: nn.Module
    optimizer_set: OptimizerSet
    state: TrainerState
    hooks: Hooks
    metrics: StageState
    settings: TrainerOptions
    stop: StopCondition
    save_stop_checkpoint: Callable[[], None] | None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The fit's optimizers; a callback may replace the list."""
        return self.optimizer_set.optimizers

    @property
    def schedulers(self) -> list[SchedulerConfig]:
        """The fit's schedulers; a callback may replace the list."""
        return self.optimizer_set.schedulers

"""The Trainer, and the module that it trains."""

from rankwise.trainer.module import TrainingModule
from rankwise.trainer.trainer import Trainer

__all__ = ["Trainer", "TrainingModule"]

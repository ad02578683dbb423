"""The Trainer, the module that it trains, and its data module."""

from rankwise.trainer.data import DataModule
from rankwise.trainer.module import TrainingModule
from rankwise.trainer.trainer import Trainer

__all__ = ["DataModule", "Trainer", "TrainingModule"]

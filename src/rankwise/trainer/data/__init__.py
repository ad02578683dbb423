"""A Trainer's data: data modules, the hooks that they share with modules, and the training data."""

from rankwise.trainer.data.data_module import DataModule

__all__ = ["DataModule"]

"""A stage's data: loaders and each rank's part of them, data modules, and the hooks shared with modules."""

from rankwise.trainer.data.data_module import DataModule

__all__ = ["DataModule"]

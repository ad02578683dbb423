"""Where a Trainer's data come from: its data module, and the hooks that data modules and modules share."""

from rankwise.trainer.data.data_module import DataModule

__all__ = ["DataModule"]

"""Names of `lightning.pytorch.core`."""

from rankwise.hyperparameters import HyperparametersMixin
from rankwise.lightning._modules import complete_module
from rankwise.trainer import DataModule as LightningDataModule
from rankwise.trainer import TrainingModule as LightningModule

__all__ = ["HyperparametersMixin", "LightningDataModule", "LightningModule"]

__getattr__ = complete_module(__name__)

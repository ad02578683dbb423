"""Names of `lightning.pytorch.core`."""

from rankwise.hyperparameters import HyperparametersMixin
from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.trainer import DataModule as LightningDataModule
from rankwise.trainer import TrainingModule as LightningModule

__all__ = ["HyperparametersMixin", "LightningDataModule", "LightningModule"]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "datamodule", "mixins", "module")

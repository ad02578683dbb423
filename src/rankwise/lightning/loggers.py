"""Names of `lightning.pytorch.loggers` and `lightning.fabric.loggers`."""

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
    rank_zero_experiment,
)

__all__ = [
    "CSVLogger",
    "Logger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "rank_zero_experiment",
]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "csv_logs", "logger", "mlflow", "tensorboard", "wandb")

"""Loggers record the metrics of a trainer: `Logger`, their base class, and those that are built in."""

from rankwise.loggers.base import Logger, rank_zero_experiment
from rankwise.loggers.csv_files import CSVLogger
from rankwise.loggers.mlflow import MLFlowLogger
from rankwise.loggers.tensorboard import TensorBoardLogger
from rankwise.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "Logger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "rank_zero_experiment",
]

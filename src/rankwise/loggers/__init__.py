"""Loggers record the metrics of a trainer: `Logger`, their base class, and those that are built in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.loggers.base import Logger, rank_zero_experiment
    from rankwise.loggers.mlflow import MLFlowLogger
    from rankwise.loggers.names import LoggerRegistry
    from rankwise.loggers.run_folders import CSVLogger, TensorBoardLogger
    from rankwise.loggers.wandb import WandbLogger

_HOMES = {
    "rankwise.loggers.base": "Logger rank_zero_experiment",
    "rankwise.loggers.mlflow": "MLFlowLogger",
    "rankwise.loggers.names": "LoggerRegistry",
    "rankwise.loggers.run_folders": "CSVLogger TensorBoardLogger",
    "rankwise.loggers.wandb": "WandbLogger",
}

__all__ = [
    "CSVLogger",
    "Logger",
    "LoggerRegistry",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "rank_zero_experiment",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)

"""Loggers: record the metrics of a trainer."""

from rankwise.loggers.base import Logger
from rankwise.loggers.csv_logger import CSVLogger

__all__ = ["CSVLogger", "Logger"]

"""Callbacks: objects that a trainer calls at fixed points of a stage."""

from rankwise.callbacks.base import Callback, MonitoringCallback
from rankwise.callbacks.early_stopping import EarlyStopping
from rankwise.callbacks.model_checkpoint import ModelCheckpoint
from rankwise.callbacks.progress_bar import TQDMProgressBar
from rankwise.callbacks.timer import Timer

__all__ = ["Callback", "EarlyStopping", "ModelCheckpoint", "MonitoringCallback", "TQDMProgressBar", "Timer"]

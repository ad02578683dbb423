"""Callbacks: objects that a trainer calls at fixed points of a stage."""

from rankwise.callbacks.base import Callback, MonitoringCallback
from rankwise.callbacks.early_stopping import EarlyStopping
from rankwise.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from rankwise.callbacks.lambda_callback import LambdaCallback
from rankwise.callbacks.learning_rate_finder import LearningRateCurve, LearningRateFinder
from rankwise.callbacks.model_checkpoint import ModelCheckpoint
from rankwise.callbacks.model_summary import ModelSummary
from rankwise.callbacks.monitors import DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor
from rankwise.callbacks.prediction_writer import BasePredictionWriter
from rankwise.callbacks.progress_bar import ProgressBar, TQDMProgressBar
from rankwise.callbacks.rich_progress_bar import RichProgressBar, RichProgressBarTheme
from rankwise.callbacks.timer import Timer
from rankwise.callbacks.weights import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateCurve",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "MonitoringCallback",
    "ProgressBar",
    "RichProgressBar",
    "RichProgressBarTheme",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

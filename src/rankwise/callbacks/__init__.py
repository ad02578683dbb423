"""Callbacks: objects that a trainer calls at fixed points of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lazy_names import lazy_names

if TYPE_CHECKING:
    from rankwise.callbacks.base import Callback, MonitoringCallback, PreparingCallback
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

_HOMES = {
    "BackboneFinetuning": "rankwise.callbacks.weights",
    "BaseFinetuning": "rankwise.callbacks.weights",
    "BasePredictionWriter": "rankwise.callbacks.prediction_writer",
    "Callback": "rankwise.callbacks.base",
    "DeviceStatsMonitor": "rankwise.callbacks.monitors",
    "EMAWeightAveraging": "rankwise.callbacks.weights",
    "EarlyStopping": "rankwise.callbacks.early_stopping",
    "GradientAccumulationScheduler": "rankwise.callbacks.gradient_accumulation_scheduler",
    "LambdaCallback": "rankwise.callbacks.lambda_callback",
    "LearningRateCurve": "rankwise.callbacks.learning_rate_finder",
    "LearningRateFinder": "rankwise.callbacks.learning_rate_finder",
    "LearningRateMonitor": "rankwise.callbacks.monitors",
    "ModelCheckpoint": "rankwise.callbacks.model_checkpoint",
    "ModelSummary": "rankwise.callbacks.model_summary",
    "MonitoringCallback": "rankwise.callbacks.base",
    "PreparingCallback": "rankwise.callbacks.base",
    "ProgressBar": "rankwise.callbacks.progress_bar",
    "RichProgressBar": "rankwise.callbacks.rich_progress_bar",
    "RichProgressBarTheme": "rankwise.callbacks.rich_progress_bar",
    "StochasticWeightAveraging": "rankwise.callbacks.weights",
    "TQDMProgressBar": "rankwise.callbacks.progress_bar",
    "ThroughputMonitor": "rankwise.callbacks.monitors",
    "Timer": "rankwise.callbacks.timer",
    "WeightAveraging": "rankwise.callbacks.weights",
}

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
    "PreparingCallback",
    "ProgressBar",
    "RichProgressBar",
    "RichProgressBarTheme",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)

"""Callbacks: objects that a trainer calls at fixed points of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.callbacks.base import Callback, LambdaCallback, MonitoringCallback, PreparingCallback
    from rankwise.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from rankwise.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from rankwise.callbacks.learning_rate_finder import LearningRateCurve, LearningRateFinder
    from rankwise.callbacks.model_checkpoint import ModelCheckpoint
    from rankwise.callbacks.model_summary import ModelSummary
    from rankwise.callbacks.monitors import DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor
    from rankwise.callbacks.prediction_writer import BasePredictionWriter
    from rankwise.callbacks.progress_bar import ProgressBar, TQDMProgressBar
    from rankwise.callbacks.rich_progress_bar import RichProgressBar, RichProgressBarTheme
    from rankwise.callbacks.stopping import EarlyStopping, Timer
    from rankwise.callbacks.weight_averaging import (
        EMAWeightAveraging,
        StochasticWeightAveraging,
        WeightAveraging,
    )

_HOMES = {
    "rankwise.callbacks.base": "Callback LambdaCallback MonitoringCallback PreparingCallback",
    "rankwise.callbacks.finetuning": "BackboneFinetuning BaseFinetuning",
    "rankwise.callbacks.gradient_accumulation_scheduler": "GradientAccumulationScheduler",
    "rankwise.callbacks.learning_rate_finder": "LearningRateCurve LearningRateFinder",
    "rankwise.callbacks.model_checkpoint": "ModelCheckpoint",
    "rankwise.callbacks.model_summary": "ModelSummary",
    "rankwise.callbacks.monitors": "DeviceStatsMonitor LearningRateMonitor ThroughputMonitor",
    "rankwise.callbacks.prediction_writer": "BasePredictionWriter",
    "rankwise.callbacks.progress_bar": "ProgressBar TQDMProgressBar",
    "rankwise.callbacks.rich_progress_bar": "RichProgressBar RichProgressBarTheme",
    "rankwise.callbacks.stopping": "EarlyStopping Timer",
    "rankwise.callbacks.weight_averaging": "EMAWeightAveraging StochasticWeightAveraging WeightAveraging",
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

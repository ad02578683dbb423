"""Callbacks: objects that a trainer calls at fixed points of a stage."""

from rankwise.callbacks.backbone_finetuning import BackboneFinetuning
from rankwise.callbacks.base import Callback, MonitoringCallback
from rankwise.callbacks.device_stats_monitor import DeviceStatsMonitor
from rankwise.callbacks.early_stopping import EarlyStopping
from rankwise.callbacks.ema_weight_averaging import EMAWeightAveraging
from rankwise.callbacks.finetuning import BaseFinetuning
from rankwise.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from rankwise.callbacks.lambda_callback import LambdaCallback
from rankwise.callbacks.learning_rate_monitor import LearningRateMonitor
from rankwise.callbacks.model_checkpoint import ModelCheckpoint
from rankwise.callbacks.model_summary import ModelSummary
from rankwise.callbacks.prediction_writer import BasePredictionWriter
from rankwise.callbacks.progress_bar import ProgressBar, TQDMProgressBar
from rankwise.callbacks.rich_progress_bar import RichProgressBar, RichProgressBarTheme
from rankwise.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from rankwise.callbacks.throughput_monitor import ThroughputMonitor
from rankwise.callbacks.timer import Timer
from rankwise.callbacks.weight_averaging import WeightAveraging

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

"""Callbacks: objects that a trainer calls at fixed points of a stage."""

from rankwise.callbacks.backbone_finetuning import BackboneFinetuning
from rankwise.callbacks.base import Callback, MonitoringCallback
from rankwise.callbacks.early_stopping import EarlyStopping
from rankwise.callbacks.ema_weight_averaging import EMAWeightAveraging
from rankwise.callbacks.finetuning import BaseFinetuning
from rankwise.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from rankwise.callbacks.lambda_callback import LambdaCallback
from rankwise.callbacks.learning_rate_monitor import LearningRateMonitor
from rankwise.callbacks.model_checkpoint import ModelCheckpoint
from rankwise.callbacks.model_summary import ModelSummary
from rankwise.callbacks.progress_bar import TQDMProgressBar
from rankwise.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from rankwise.callbacks.timer import Timer
from rankwise.callbacks.weight_averaging import WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "Callback",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "MonitoringCallback",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Timer",
    "WeightAveraging",
]

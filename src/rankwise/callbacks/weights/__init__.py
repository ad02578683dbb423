"""Callbacks that average weights, or freeze and train a part of them."""

from rankwise.callbacks.weights.backbone_finetuning import BackboneFinetuning
from rankwise.callbacks.weights.ema_weight_averaging import EMAWeightAveraging
from rankwise.callbacks.weights.finetuning import BaseFinetuning
from rankwise.callbacks.weights.stochastic_weight_averaging import StochasticWeightAveraging
from rankwise.callbacks.weights.weight_averaging import WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "EMAWeightAveraging",
    "StochasticWeightAveraging",
    "WeightAveraging",
]

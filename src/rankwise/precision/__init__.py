"""The number format in which a module computes, and how gradients are scaled and clipped in it."""

from rankwise.precision.base import Precision, configured_optimizers, gradient_values
from rankwise.precision.formats import DoublePrecision, HalfPrecision, MixedPrecision, create_precision
from rankwise.precision.loss_scaling import are_finite
from rankwise.precision.master_weights import MasterWeightsPrecision

__all__ = [
    "DoublePrecision",
    "HalfPrecision",
    "MasterWeightsPrecision",
    "MixedPrecision",
    "Precision",
    "are_finite",
    "configured_optimizers",
    "create_precision",
    "gradient_values",
]

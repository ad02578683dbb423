"""The number format in which a module computes, and how gradients are scaled and clipped in it."""

from rankwise.precision.base import Precision, are_finite, configured_optimizers, gradient_values
from rankwise.precision.formats import (
    DoublePrecision,
    HalfPrecision,
    MasterWeightsPrecision,
    MixedPrecision,
    create_precision,
)

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

"""Precision: in which number format a module computes, and how gradients are scaled and clipped in it."""

from rankwise.precision.base import Precision
from rankwise.precision.factory import create_precision

__all__ = ["Precision", "create_precision"]

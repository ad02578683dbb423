"""Profilers: how long the parts of a stage take."""

from rankwise.profilers.advanced import AdvancedProfiler
from rankwise.profilers.base import PassThroughProfiler, Profiler
from rankwise.profilers.by_name import create_profiler
from rankwise.profilers.pytorch import PyTorchProfiler
from rankwise.profilers.simple import SimpleProfiler

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "create_profiler",
]

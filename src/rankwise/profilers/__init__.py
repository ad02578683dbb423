"""Profilers: how long the parts of a stage take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lazy_names import lazy_names

if TYPE_CHECKING:
    from rankwise.profilers.advanced import AdvancedProfiler
    from rankwise.profilers.base import PassThroughProfiler, Profiler
    from rankwise.profilers.by_name import create_profiler
    from rankwise.profilers.pytorch import PyTorchProfiler
    from rankwise.profilers.simple import SimpleProfiler

_HOMES = {
    "AdvancedProfiler": "rankwise.profilers.advanced",
    "PassThroughProfiler": "rankwise.profilers.base",
    "Profiler": "rankwise.profilers.base",
    "PyTorchProfiler": "rankwise.profilers.pytorch",
    "SimpleProfiler": "rankwise.profilers.simple",
    "create_profiler": "rankwise.profilers.by_name",
}

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "create_profiler",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)

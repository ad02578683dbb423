"""Profilers: how long the parts of a stage take."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rankwise.checks import check_name, check_overrides
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.profilers.advanced import AdvancedProfiler
    from rankwise.profilers.base import PassThroughProfiler, Profiler, SimpleProfiler
    from rankwise.profilers.pytorch import PyTorchProfiler

_HOMES = {
    "rankwise.profilers.advanced": "AdvancedProfiler",
    "rankwise.profilers.base": "PassThroughProfiler Profiler SimpleProfiler",
    "rankwise.profilers.pytorch": "PyTorchProfiler",
}
_CLASSES = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}

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


def create_profiler(given: Any) -> Profiler:
    """Return the profiler of a name, the given one, or for None one that measures nothing.

    Raises:
        UnknownNameError: for another name.
        InvalidTypeError: for other values.
        ConfigurationError: for a method of a user's class that would never be called.
    """
    from rankwise.profilers import base

    if isinstance(given, base.Profiler):
        check_overrides(given, MISSING_HOOKS["profiler"])
        return given
    name = "PassThroughProfiler"
    if given is not None:
        expected = f"an instance of Profiler, or one of {', '.join(map(repr, _CLASSES))}"
        name = _CLASSES[check_name("profiler", given, tuple(_CLASSES), expected)]
    profiler: Profiler = getattr(sys.modules[__name__], name)()  # imports what it measures with
    return profiler

"""`create_profiler`: the profiler that a Trainer's argument means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankwise.checks import check_name
from rankwise.profilers.base import PassThroughProfiler, Profiler

_NAMES = ("simple", "advanced", "pytorch")


def create_profiler(given: Any) -> Profiler:
    """Return the profiler of a name, the given one, or for None one that measures nothing.

    Raises:
        UnknownNameError: for another name.
        InvalidTypeError: for other values.
    """
    if given is None:
        return PassThroughProfiler()
    if isinstance(given, Profiler):
        return given
    expected = f"an instance of Profiler, or one of {', '.join(map(repr, _NAMES))}"
    return _class_of(check_name("profiler", given, _NAMES, expected))()


def _class_of(name: str) -> Callable[[], Profiler]:
    """Import a profiler, and what it measures with, which few programs need."""
    if name == "simple":
        from rankwise.profilers.simple import SimpleProfiler

        return SimpleProfiler
    if name == "advanced":
        from rankwise.profilers.advanced import AdvancedProfiler

        return AdvancedProfiler
    from rankwise.profilers.pytorch import PyTorchProfiler

    return PyTorchProfiler

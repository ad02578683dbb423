"""`create_profiler`: the profiler that a Trainer's argument means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankwise.named_options import check_name
from rankwise.profilers.advanced import AdvancedProfiler
from rankwise.profilers.base import PassThroughProfiler, Profiler
from rankwise.profilers.pytorch import PyTorchProfiler
from rankwise.profilers.simple import SimpleProfiler

_NAMES: Mapping[str, Callable[[], Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def create_profiler(given: Any) -> Profiler:
    """Return the profiler of a name, the given one, or for None one that measures nothing.

    Raises:
        UnknownNameError: for another name.
        InvalidTypeError: for what is neither.
    """
    if given is None:
        return PassThroughProfiler()
    if isinstance(given, Profiler):
        return given
    expected = f"an instance of Profiler, or one of {', '.join(map(repr, _NAMES))}"
    return _NAMES[check_name("profiler", given, tuple(_NAMES), expected)]()

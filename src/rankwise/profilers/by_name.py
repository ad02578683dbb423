"""`create_profiler`: the profiler that a Trainer's argument means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.errors import InvalidArgumentError, InvalidTypeError
from rankwise.profilers.base import PassThroughProfiler, Profiler
from rankwise.profilers.pytorch import PyTorchProfiler
from rankwise.profilers.simple import SimpleProfiler

_NAMES: Mapping[str, type[Profiler]] = {"simple": SimpleProfiler, "pytorch": PyTorchProfiler}


def create_profiler(given: Any) -> Profiler:
    """Return the profiler of a name, the given one, or for None one that measures nothing.

    Raises:
        InvalidArgumentError: for another name.
        InvalidTypeError: for what is neither.
    """
    if given is None:
        return PassThroughProfiler()
    if isinstance(given, Profiler):
        return given
    if not isinstance(given, str):
        expected = '"simple", "pytorch" or an instance of Profiler'
        raise InvalidTypeError(argument="profiler", value=given, expected=expected)
    if given.lower() not in _NAMES:
        expected = (
            '"simple", or "pytorch"; for functions of Python: python -m cProfile -s cumulative script.py'
        )
        raise InvalidArgumentError(argument="profiler", value=given, expected=expected)
    kind: Any = _NAMES[given.lower()]
    created: Profiler = kind()
    return created

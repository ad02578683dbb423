"""Parameters of tests: in pairs or a few of many, where all combinations would show no more."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

A = TypeVar("A")
B = TypeVar("B")


def in_turn(cases: Iterable[A], options: Sequence[B], start: int = 0) -> list[tuple[A, B]]:
    """Return each case with one of the options, which take turns, the one at `start` first."""
    return [(case, options[number % len(options)]) for number, case in enumerate(cases, start)]


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases as parameters, those after the first `count` with the marker `soak`."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    by_hand = [pytest.param(*each, marks=pytest.mark.soak) for each in values[count:]]
    return [pytest.param(*each) for each in values[:count]] + by_hand

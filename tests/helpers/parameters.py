"""Parameters of tests in pairs, where all combinations would show no more."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def in_turn(cases: Iterable[A], options: Sequence[B], start: int = 0) -> list[tuple[A, B]]:
    """Return each case with one of the options, which take turns, the one at `start` first."""
    return [(case, options[number % len(options)]) for number, case in enumerate(cases, start)]

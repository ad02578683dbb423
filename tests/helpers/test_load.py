"""Limits grow with the load of the machine."""

import os

import pytest

from tests.helpers import load


@pytest.mark.parametrize(
    ("average", "running", "expected"),
    [(0.1, 0, 1.0), (2.0, 1, 1.0), (6.0, 1, 3.0), (0.1, 5, 2.5), (100.0, 1, load.MOST)],
)
def test_slowdown(average: float, running: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that have more to do than they can make everything slower, within bounds."""
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    monkeypatch.setattr(load, "_cores", lambda: 2)
    monkeypatch.setattr(load, "_running_now", lambda: running)
    assert load.slowdown() == expected

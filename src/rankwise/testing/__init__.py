"""Test code that runs on several ranks, and extensions of rankwise. Needs pytest for the marker alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.testing.running import run_distributed

_HOMES = {"rankwise.testing.running": "run_distributed"}

__all__ = ["run_distributed"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)

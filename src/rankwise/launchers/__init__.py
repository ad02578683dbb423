"""Launchers: start processes, watch them, end them.

A launcher runs an entry with a `WorkerContext` on each rank; a strategy does the rest.
"""

from rankwise.launchers.base import Launcher
from rankwise.launchers.context import WorkerContext

__all__ = ["Launcher", "WorkerContext"]

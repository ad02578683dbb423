"""Launchers: start processes, watch them, end them.

A launcher runs an entry with a `WorkerContext` on each rank; a strategy does the rest.
"""

from rankwise.launchers.context import Launcher, WorkerContext

__all__ = ["Launcher", "WorkerContext"]

"""`Launcher`: start the local ranks of a job, watch them, end them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rankwise.launchers.context import Entry

__all__ = ["Launcher"]


class Launcher(ABC):
    """Run one function as every local rank.

    Attributes:
        runs_in_caller: whether the calling process is a rank itself, so that what the function changes is
            changed in the caller.
        pickles_entry: whether the function and its arguments travel as a pickle.
    """

    runs_in_caller: ClassVar[bool]
    pickles_entry: bool = False

    @abstractmethod
    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Run `entry(worker)` once per local rank; return the values by global rank.

        Args:
            entry: what to run. It must set up and tear down by itself.
            described: the parts of `entry` by the names that its user knows them by, for error messages.
            rendezvous: `"private"` or `"tcp"`; where the processes exist already, they have their own.

        Raises:
            LaunchRefusedError: when this launcher cannot work here; nothing was started.
            NotPicklableError: when something cannot travel; nothing was started.
            WorkerError: when a rank failed; all others are gone by then.
        """

    @abstractmethod
    def close(self) -> None:
        """End what the launcher has started and still keeps."""

"""`Launcher`: the interface of what starts, supervises and ends the local ranks of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rankwise.launchers.context import Entry


class Launcher(ABC):
    """Run one function as every local rank.

    Attributes:
        runs_in_caller: whether the calling process is a rank itself, so that what the function changes is
            changed in the caller.
        pickles_entry: whether the function and its arguments are pickled.
    """

    runs_in_caller: ClassVar[bool]
    pickles_entry: bool = False

    @abstractmethod
    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Run `entry(worker)` once per local rank; return the values by global rank.

        Args:
            entry: what to run; it sets up and tears down.
            described: the parts of `entry` by the names that error messages use for them.
            rendezvous: `"private"` or `"tcp"`; ignored where the processes exist already.

        Raises:
            LaunchRefusedError: when this launcher cannot work here; nothing was started.
            NotPicklableError: when a part cannot be pickled; nothing was started.
            WorkerError: when a rank failed; all others have ended by then.
        """

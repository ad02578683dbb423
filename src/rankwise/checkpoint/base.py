"""`CheckpointIO`: what a place that keeps checkpoints must be able to do."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

__all__ = ["CheckpointIO"]


class CheckpointIO(ABC):
    """Write, read and remove checkpoints. Subclass it for another format or another kind of storage."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write `checkpoint` to `path`; called on global rank 0 only.

        Raises:
            CheckpointError: when it cannot be written; what was at `path` before must then still be whole.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at `path`; called on every rank.

        Raises:
            CheckpointError: when it is missing, damaged or not to be trusted.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path`, if there is one; called on global rank 0 only."""

    def check_checkpoint(
        self, part: dict[str, Any], path: str | os.PathLike[str]
    ) -> None:  # a format may hold all
        """Refuse a part of what is to be written below `path`, if no checkpoint could hold it.

        Called before training begins, so that this is not known only when the first is saved.

        Raises:
            CheckpointError: naming what cannot be written, or could not be loaded.
        """

    def on_saving_changed(self, tell: Callable[[bool], None]) -> None:  # most write while training waits
        """Call `tell` with True when a thread begins to write, and with False when nothing is left to write.

        From then on, and from any thread. A rank that has to leave is not killed in between.
        """

    def teardown(self) -> None:  # most have nothing to do
        """Finish what is not finished yet; called on every rank when a job ends, be it by a failure.

        Raises:
            CheckpointError: when a checkpoint could not be written.
        """

"""`Saving`: a strategy's checkpoints, written by rank zero while the others wait."""

from __future__ import annotations

import os
from typing import Any

from rankwise.checkpoint import CheckpointIO
from rankwise.failures.classify import mark_propagated
from rankwise.monitoring.heartbeat import report_phase
from rankwise.strategies._together import Together

__all__ = ["Saving"]


class Saving(Together):
    """Writes and reads checkpoints through the plug-in that the strategy was given.

    Attributes:
        checkpoint_io: that plug-in.
    """

    checkpoint_io: CheckpointIO

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Let global rank 0 write a checkpoint; all ranks go on when it is written, or all raise.

        Collective: every rank must call this, in the same order.

        Raises:
            CheckpointError: on every rank, when it could not be written.
        """
        error: Exception | None = None
        if self.ranks.is_global_zero:
            try:
                report_phase("checkpoint")
                self.checkpoint_io.save_checkpoint(checkpoint, path)
            except Exception as raised:  # noqa: BLE001  raised below, once the other ranks know
                error = raised
        error = self.broadcast(error)
        if error is not None:
            raise error if self.ranks.is_global_zero else mark_propagated(error)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a checkpoint, to the CPU."""
        return self.checkpoint_io.load_checkpoint(path, map_location="cpu")

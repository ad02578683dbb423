"""`Progress`: how far a fit has come."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import final

__all__ = ["Progress"]


@final
@dataclass
class Progress:
    """Where in the training data, and at which optimizer step, a fit is.

    Attributes:
        current_epoch: completed epochs; within an epoch, its number.
        global_step: optimizer steps made.
        batches_done: batches of the current epoch that this rank has trained on.
        is_epoch_done: whether those were all of them; from then on until the next epoch begins.
    """

    current_epoch: int = 0
    global_step: int = 0
    batches_done: int = 0
    is_epoch_done: bool = False

    def begin_epoch(self) -> None:
        """Start the current epoch at its first batch; resuming within an epoch would start later."""
        self.batches_done = 0
        self.is_epoch_done = False

    def end_batch(self, is_last: bool) -> None:
        """Count a batch of the current epoch."""
        self.batches_done += 1
        self.is_epoch_done = is_last

    def end_epoch(self) -> None:
        """Go on to the next epoch, if this one is done; one that was cut short begins again."""
        if self.is_epoch_done:
            self.current_epoch += 1
            self.begin_epoch()

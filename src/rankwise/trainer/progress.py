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
        samples_done: what all ranks together have taken of the current epoch's stream of indices; another
            number of ranks goes on from the same place.
        window_batches: how many of those belong to an accumulation window that has not ended: their gradients
            are not in the weights yet.
        window_samples: the samples of those batches.
        is_epoch_done: whether those were all of them; from then on until the next epoch begins.
        is_validated: whether the validation that was due after the last batch has been run.
        is_epoch_closed: whether the epoch's hooks and metrics have ended, be it at its end or cut short.
    """

    current_epoch: int = 0
    global_step: int = 0
    batches_done: int = 0
    samples_done: int = 0
    window_batches: int = 0
    window_samples: int = 0
    is_epoch_done: bool = False
    is_validated: bool = False
    is_epoch_closed: bool = False

    def begin_epoch(self) -> None:
        """Start the current epoch at its first batch."""
        self.batches_done = self.samples_done = self.window_batches = self.window_samples = 0
        self.is_epoch_done = self.is_validated = self.is_epoch_closed = False

    def end_batch(self, is_last: bool, samples: int = 0, is_window_end: bool = True) -> None:
        """Count a batch of the current epoch, for which the ranks took that many `samples`."""
        self.batches_done += 1
        self.samples_done += samples
        self.window_batches = 0 if is_window_end else self.window_batches + 1
        self.window_samples = 0 if is_window_end else self.window_samples + samples
        self.is_epoch_done = is_last
        self.is_validated = self.is_epoch_closed = False

    def repeat_window(self) -> None:
        """Go back to the first batch of a window that was cut short: its gradients are gone."""
        if self.window_batches:
            self.batches_done -= self.window_batches
            self.samples_done -= self.window_samples
            self.window_batches = self.window_samples = 0
            self.is_validated = True  # before that batch, if it was due

    def end_epoch(self) -> None:
        """Go on to the next epoch, if this one is done; one that was cut short goes on later."""
        if self.is_epoch_done:
            self.current_epoch += 1
            self.begin_epoch()

    @property
    def is_within_epoch(self) -> bool:
        """Whether some of the current epoch's batches are done."""
        return self.batches_done > 0

    @property
    def is_epoch_open(self) -> bool:
        """Whether an epoch was begun whose hooks and metrics have not ended yet."""
        return self.is_within_epoch and not self.is_epoch_closed

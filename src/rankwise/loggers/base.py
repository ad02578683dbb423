"""`Logger`: what a place that takes metrics must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ["Logger"]


class Logger(ABC):
    """Take metrics as they come. Subclass it for another place to log to.

    Metrics are logged on global rank 0 only; `state_dict` is read there and loaded on the other ranks, and in
    the calling process, so that all agree on the version and the folder.
    """

    @property
    def log_dir(self) -> str | None:
        """The folder that the logger writes to; None if it writes to none."""
        return None

    @property
    def log_dirs(self) -> list[str]:
        """The folders of this run and, where each run gets one of its own, of those before it."""
        return [] if self.log_dir is None else [self.log_dir]

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Take metrics that belong to the optimizer step `step`; called on global rank 0 only."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Take the hyper parameters of a run; called on global rank 0 only."""

    def save(self) -> None:
        """Write what is still held in memory; called on global rank 0 only."""

    def finalize(self, status: str) -> None:
        """End a stage; `status` is `"success"` or `"failed"`. Called on global rank 0 only."""
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return what other processes must know, such as the version."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned in another process."""

"""`Logger`: the base class of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ["Logger"]


class Logger(ABC):
    """Base class of loggers, which record metrics.

    Metrics are logged on global rank 0 only. Its `state_dict` is loaded on the other ranks and in the calling
    process, so that version and folder are equal everywhere.
    """

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, or None if the logger writes no files."""
        return None

    @property
    def log_dirs(self) -> list[str]:
        """The folders of this run and, if each run has a folder of its own, of earlier runs."""
        return [] if self.log_dir is None else [self.log_dir]

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics of the optimizer step `step`; called on global rank 0 only."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the hyper parameters of a run; called on global rank 0 only."""

    def save(self) -> None:
        """Write buffered metrics; called on global rank 0 only."""

    def finalize(self, status: str) -> None:
        """End a stage; `status` is `"success"` or `"failed"`. Called on global rank 0 only."""
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return what other processes need, such as the version."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned in another process."""

"""`MonitoringCallback`: a callback that acts on a metric, at the moment when metrics are complete."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankwise.callbacks.base import Callback
from rankwise.errors import ConfigurationError, InvalidArgumentError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

__all__ = ["MonitoringCallback"]


class MonitoringCallback(Callback):
    """Call `on_metrics_ready` after every validation, or after every epoch where nothing is validated.

    A validation at the end of an epoch counts once the epoch's own metrics are there too. The Trainer runs
    these callbacks after all others.

    Args:
        monitor: the logged metric to act on; None for none.
        mode: `"min"` or `"max"`: which values of it are better.

    Raises:
        InvalidArgumentError: for another mode.
    """

    def __init__(self, monitor: str | None, mode: str) -> None:
        if mode not in ("min", "max"):
            raise InvalidArgumentError(argument="mode", value=mode, expected="'min' or 'max'")
        self.monitor = monitor
        self.mode = mode

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Act; overridden by subclasses. Runs on every rank."""

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.is_fitting and not trainer.progress.is_epoch_done:
            self.on_metrics_ready(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.progress.is_validated or not trainer.has_validation or self.monitor is None:
            self.on_metrics_ready(trainer, module)

    @property
    def worst(self) -> float:
        """A score that every other beats."""
        return math.inf if self.mode == "min" else -math.inf

    def is_better(self, score: float, other: float, min_delta: float = 0.0) -> bool:
        """Return whether `score` beats `other` by more than `min_delta`."""
        return score < other - min_delta if self.mode == "min" else score > other + min_delta

    def monitored_value(self, trainer: Trainer) -> float | None:
        """Return the monitored metric's value on this rank; None where it was not logged."""
        value = trainer.callback_metrics.get(self.monitor or "")
        return None if value is None else float(value)

    def missing_metric(self, trainer: Trainer) -> ConfigurationError:
        """Return the error that says that the monitored metric was not logged."""
        logged = ", ".join(repr(name) for name in sorted(trainer.callback_metrics)) or "nothing"
        return ConfigurationError(
            message=f"{type(self).__name__}(monitor={self.monitor!r}) finds no such metric.",
            facts=f"logged so far: {logged}.",
            remedy=f'self.log("{self.monitor}", value) in a step of the module, or another monitor.',
        )

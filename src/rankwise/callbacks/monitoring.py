"""`MonitoringCallback`: base class of callbacks that act on a metric once it is complete."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rankwise.callbacks.base import Callback
from rankwise.errors import ConfigurationError, InvalidArgumentError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

__all__ = ["MonitoringCallback"]


class MonitoringCallback(Callback):
    """Call `on_metrics_ready` after every validation, or after every epoch without validation.

    After a validation at the end of an epoch, the call comes when the epoch's own metrics exist too. The
    Trainer runs these callbacks after all others.

    Args:
        monitor: name of a logged metric, or None.
        mode: `"min"` or `"max"`: whether lower or higher values are better.

    Raises:
        InvalidArgumentError: if `mode` is something else.
    """

    def __init__(self, monitor: str | None, mode: str) -> None:
        if mode not in ("min", "max"):
            raise InvalidArgumentError(argument="mode", value=mode, expected="'min' or 'max'")
        self.monitor = monitor
        self.mode = mode

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Act on the metric; subclasses override it. Runs on every rank."""

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.is_fitting and not trainer.progress.is_epoch_done:
            self.on_metrics_ready(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.progress.is_validated or not trainer.has_validation or self.monitor is None:
            self.on_metrics_ready(trainer, module)

    @property
    def worst(self) -> float:
        """The score that is worse than every other."""
        return math.inf if self.mode == "min" else -math.inf

    def is_better(self, score: float, other: float, min_delta: float = 0.0) -> bool:
        """Return whether `score` is better than `other` by more than `min_delta`."""
        return score < other - min_delta if self.mode == "min" else score > other + min_delta

    def monitored_value(self, trainer: Trainer) -> float | None:
        """Return the metric's value on this rank, or None if it was not logged."""
        value = trainer.callback_metrics.get(self.monitor or "")
        return None if value is None else float(value)

    def missing_metric(self, trainer: Trainer) -> ConfigurationError:
        """Return the error for a metric that was not logged."""
        logged = ", ".join(repr(name) for name in sorted(trainer.callback_metrics)) or "nothing"
        return ConfigurationError(
            message=f"{type(self).__name__}(monitor={self.monitor!r}) finds no such metric.",
            facts=f"logged so far: {logged}.",
            remedy=f'self.log("{self.monitor}", value) in a step of the module, or another monitor.',
        )

"""`LoggingCallback`: base class of callbacks that log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.callbacks.base import Callback
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule


class LoggingCallback(Callback):
    """Base class of callbacks that log while `fit` runs.

    Raises:
        ConfigurationError: in `fit`, for a Trainer without loggers.
    """

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers and not trainer.fast_dev_run:
            name = type(self).__name__
            raise ConfigurationError(
                message=f"{name} has no logger to log to.",
                facts="the trainer has no loggers.",
                remedy=f"Trainer(logger=True), or leave out the {name}.",
            )

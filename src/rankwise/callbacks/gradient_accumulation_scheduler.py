"""`GradientAccumulationScheduler`: accumulate gradients over other numbers of batches in later epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from rankwise.callbacks.base import Callback
from rankwise.checks import check_value
from rankwise.errors import ConfigurationError, InvalidTypeError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule


@final
class GradientAccumulationScheduler(Callback):
    """Set `trainer.accumulate_grad_batches` at the start of epochs.

    Args:
        scheduling: the number of batches in an optimizer step from each epoch on: `{0: 8, 4: 4}`
            accumulates 8 batches in epochs 0 to 3, and 4 later. Epochs before the first one accumulate 1.

    Raises:
        InvalidTypeError: if it is not a dictionary of whole numbers.
        InvalidArgumentError: if it is empty, or has numbers that are too small.
        ConfigurationError: in `fit`, for manual optimisation, and with the Trainer's own
            `accumulate_grad_batches`.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        expected = "a dictionary of epochs, 0 or more, and numbers of batches, 1 or more"
        is_mapping = isinstance(scheduling, Mapping)
        is_of_int = is_mapping and all(type(each) is int for pair in scheduling.items() for each in pair)
        check_value("scheduling", scheduling, is_of_int, expected, error=InvalidTypeError)
        is_in_range = scheduling and min(scheduling) >= 0 and min(scheduling.values()) >= 1
        check_value("scheduling", dict(scheduling), is_in_range, expected)
        self.scheduling = {0: 1, **scheduling}
        self._given: int | None = None  # the Trainer's own value, outside of a fit

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage != "fit":
            return
        if not module.automatic_optimization:
            raise ConfigurationError(
                message="GradientAccumulationScheduler has no effect in manual optimisation.",
                facts=f"{type(module).__name__}.automatic_optimization is False.",
                remedy="leave it out, and accumulate gradients in training_step.",
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                message="GradientAccumulationScheduler and accumulate_grad_batches contradict each other.",
                facts=f"accumulate_grad_batches={trainer.accumulate_grad_batches}, "
                f"scheduling={self.scheduling}.",
                remedy="leave accumulate_grad_batches at 1.",
            )

    def accumulation_in(self, epoch: int) -> int:
        """Return the number of batches in an optimizer step of an epoch."""
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            self._given = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = self.accumulation_in(trainer.current_epoch)

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Set the highest number: the loop checks whether the optimizer supports it."""
        trainer.accumulate_grad_batches = max(self.scheduling.values())

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Set the current epoch's number: a run may resume within it."""
        trainer.accumulate_grad_batches = self.accumulation_in(trainer.current_epoch)

    on_train_epoch_start = on_train_start

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Give the Trainer its own value back."""
        if self._given is not None:
            trainer.accumulate_grad_batches, self._given = self._given, None

"""`BasePredictionWriter`: write predictions from `predict`, on every rank its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rankwise.callbacks.base import Callback
from rankwise.checks import check_choice
from rankwise.nested import to_device

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule


class BasePredictionWriter(Callback):
    """Base class: override `write_on_batch_end`, `write_on_epoch_end` or both.

    Each rank writes the batches that it has predicted: batch i of the data is on rank `i % world_size`. Use
    `trainer.global_rank` in file names, and `predict(..., gather=None)` where nobody needs all predictions.

    Args:
        write_interval: `"batch"`, `"epoch"` or `"batch_and_epoch"`.

    Raises:
        InvalidArgumentError: for another interval.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        check_choice("write_interval", write_interval, ("batch", "epoch", "batch_and_epoch"))
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[int] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write a batch's prediction.

        `batch_indices` are its samples' positions in the data set, None where the loader has no indices.
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write this rank's predictions: a list of batches, or with several loaders a list of such lists.

        `batch_indices` has a list for each loader, with the `batch_indices` of each batch.
        """
        raise NotImplementedError

    def on_predict_start(self, trainer: Trainer, module: TrainingModule) -> None:
        loaders = range(len(trainer.num_predict_batches))
        self._predictions, self._indices = [[] for _ in loaders], [[] for _ in loaders]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        indices = trainer.batch_indices(dataloader_idx)
        if self.write_interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.write_interval != "batch":
            converted = trainer.strategy.precision.convert_output(outputs)
            self._predictions[dataloader_idx].append(to_device(converted, "cpu"))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if self.write_interval != "batch":
            predictions = self._predictions[0] if len(self._predictions) == 1 else self._predictions
            self.write_on_epoch_end(trainer, module, predictions, self._indices)

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Free the predictions."""
        self._predictions, self._indices = [], []

"""`Callback`: the moments of a job at which a callback can act."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

__all__ = ["Callback"]


class Callback:
    """Act at moments of a job; subclass it and override the hooks you need.

    Every hook runs on every rank, except where its name says otherwise, before the module's hook of the same
    name. A stage is `"fit"`, `"validate"`, `"test"` or `"predict"`.
    """

    @property
    def state_key(self) -> str:
        """Under which name the state is kept in a checkpoint; override it to use a callback twice."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint, and the calling process, must know; plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # ------------------------------------------------------------------ any stage

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """A stage begins; the process group is there, the module not wrapped yet."""

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """A stage ends, with or without an exception."""

    def on_exception(self, trainer: Trainer, module: TrainingModule, exception: BaseException) -> None:
        """Something was raised in a stage on this rank."""

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        """A checkpoint is about to be written; it may be added to."""

    def on_load_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        """A checkpoint was read and is about to be used."""

    # ------------------------------------------------------------------ training

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Fitting begins: model, optimizers and loaders are ready."""

    def on_fit_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Fitting has ended."""

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Training begins."""

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Training has ended."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """A training epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """A training epoch has ended, the validation at its end included."""

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        """A training batch begins."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A training batch has ended; `outputs` is what `training_step` returned."""

    # ------------------------------------------------------------------ validation

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Validation begins."""

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Validation has ended; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """The validation batches begin."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """The validation batches have ended; what is logged now is still reduced with the rest."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch begins."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A validation batch has ended."""

    # ------------------------------------------------------------------ testing

    def on_test_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Testing begins."""

    def on_test_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Testing has ended; its metrics are in `trainer.callback_metrics`."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """The test batches begin."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """The test batches have ended; what is logged now is still reduced with the rest."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A test batch begins."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A test batch has ended."""

    # ------------------------------------------------------------------ prediction

    def on_predict_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Prediction begins."""

    def on_predict_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Prediction has ended."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """The batches to predict begin."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """The batches to predict have ended."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A batch to predict begins; `batch_idx` counts this rank's batches."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A batch to predict has ended."""

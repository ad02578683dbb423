"""The hooks of a training module, and how hooks of callbacks and module are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks import MonitoringCallback

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule

__all__ = ["Hooks", "ModuleHooks"]


@final
class Hooks:
    """Call the hooks of a trainer's callbacks and of its module.

    Args:
        trainer: given to the callbacks' hooks.
        module: the module of the stage.
    """

    def __init__(self, trainer: Trainer, module: TrainingModule) -> None:
        self._trainer = trainer
        self._module = module

    def call(self, name: str, *args: Any, before_monitoring: Callable[[], None] | None = None) -> None:
        """Call a hook of the callbacks, then of the module, then of the monitoring callbacks.

        `before_monitoring` runs before the monitoring callbacks and publishes the metrics that they read.
        """
        trainer, module = self._trainer, self._module
        callbacks = trainer.callbacks
        for callback in callbacks:
            if not isinstance(callback, MonitoringCallback):
                getattr(callback, name)(trainer, module, *args)
        getattr(module, name)(*args)
        if before_monitoring is not None:
            before_monitoring()
        for callback in callbacks:
            if isinstance(callback, MonitoringCallback):
                getattr(callback, name)(trainer, module, *args)


class ModuleHooks:
    """What a training module can do at moments of a job; stages are `fit`, `validate`, `test`, `predict`."""

    def prepare_data(self) -> None:
        """Download or unpack data: called on one process of each node, while the others wait."""

    def setup(self, stage: str) -> None:
        """Prepare this rank for a stage; layers may still be added."""

    def teardown(self, stage: str) -> None:
        """A stage ends, with or without an exception."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; it may be added to."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read and is about to be used."""

    # ------------------------------------------------------------------ training

    def on_fit_start(self) -> None:
        """Fitting begins: model, optimizers and loaders are ready."""

    def on_fit_end(self) -> None:
        """Fitting has ended."""

    def on_train_start(self) -> None:
        """Training begins."""

    def on_train_end(self) -> None:
        """Training has ended."""

    def on_train_epoch_start(self) -> None:
        """A training epoch begins."""

    def on_train_epoch_end(self) -> None:
        """A training epoch has ended, the validation at its end included."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A training batch begins."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A training batch has ended; `outputs` is what `training_step` returned."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Gradients are about to be cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Gradients of `loss` are about to be computed."""

    def on_after_backward(self) -> None:
        """Gradients are there; on the last batch of an accumulation they are averaged over the ranks."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step; gradients are not clipped yet."""

    # ------------------------------------------------------------------ validation

    def on_validation_start(self) -> None:
        """Validation begins."""

    def on_validation_end(self) -> None:
        """Validation has ended; its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self) -> None:
        """The validation batches begin."""

    def on_validation_epoch_end(self) -> None:
        """The validation batches have ended; what is logged now is still reduced with the rest."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A validation batch begins."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch has ended."""

    # ------------------------------------------------------------------ testing

    def on_test_start(self) -> None:
        """Testing begins."""

    def on_test_end(self) -> None:
        """Testing has ended; its metrics are in `trainer.callback_metrics`."""

    def on_test_epoch_start(self) -> None:
        """The test batches begin."""

    def on_test_epoch_end(self) -> None:
        """The test batches have ended; what is logged now is still reduced with the rest."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test batch begins."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test batch has ended."""

    # ------------------------------------------------------------------ prediction

    def on_predict_start(self) -> None:
        """Prediction begins."""

    def on_predict_end(self) -> None:
        """Prediction has ended."""

    def on_predict_epoch_start(self) -> None:
        """The batches to predict begin."""

    def on_predict_epoch_end(self) -> None:
        """The batches to predict have ended."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch to predict begins; `batch_idx` counts this rank's batches."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A batch to predict has ended."""

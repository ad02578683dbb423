"""The hooks of a training module, and the calls of the hooks of callbacks and module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks import MonitoringCallback

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule


@final
@dataclass(frozen=True)
class Hooks:
    """Call the hooks of a trainer's callbacks and of the module of a stage."""

    trainer: Trainer
    module: TrainingModule

    def call(self, name: str, *args: Any, before_monitoring: Callable[[], None] | None = None) -> None:
        """Call a hook of the callbacks, then of the module, then of the monitoring callbacks.

        `before_monitoring` runs before the monitoring callbacks and publishes the metrics that they read.
        """
        trainer, module = self.trainer, self.module
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

    def call_checkpoint_hooks(self, name: str, checkpoint: dict[str, Any]) -> None:
        """Call a hook of all callbacks in their order, the monitoring ones too, then of the module."""
        for callback in self.trainer.callbacks:
            getattr(callback, name)(self.trainer, self.module, checkpoint)
        getattr(self.module, name)(checkpoint)

    def call_exception_hooks(self, error: BaseException) -> None:
        """Call `on_exception` of the callbacks, which modules do not have."""
        for callback in self.trainer.callbacks:
            callback.on_exception(self.trainer, self.module, error)


class ModuleHooks:
    """The hooks of a training module, to override; stages are `fit`, `validate`, `test`, `predict`.

    A hook that callbacks have too runs after theirs; `Callback` describes when.
    """

    def prepare_data(self) -> None:
        """Download or unpack data; called in one process of each node, while the others wait."""

    def setup(self, stage: str) -> None:
        """Prepare this rank for a stage; layers may still be added."""

    def teardown(self, stage: str) -> None:
        """Called at the end of a stage, with or without an exception."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, or after one was read; may change it."""

    on_load_checkpoint = on_save_checkpoint

    def on_fit_start(self) -> None:
        """Called at the moment that the name states; `Callback` has a description of each."""

    on_fit_end = on_train_start = on_train_end = on_fit_start
    on_train_epoch_start = on_train_epoch_end = on_fit_start
    on_validation_start = on_validation_end = on_fit_start
    on_validation_epoch_start = on_validation_epoch_end = on_fit_start
    on_test_start = on_test_end = on_test_epoch_start = on_test_epoch_end = on_fit_start
    on_predict_start = on_predict_end = on_predict_epoch_start = on_predict_epoch_end = on_fit_start

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a training batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training batch; `outputs` is the return value of `training_step`."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before the gradients of `loss` are computed."""

    def on_after_backward(self) -> None:
        """Called after backward; an accumulation's last backward averages gradients over the ranks."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer steps; gradients are not clipped yet."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a batch; in prediction `batch_idx` counts this rank's batches."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a batch; `outputs` is the return value of the step."""

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

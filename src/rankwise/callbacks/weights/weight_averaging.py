"""`WeightAveraging`: train one model, and validate and keep the average of its weights."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise.callbacks.base import Callback
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim.swa_utils import AveragedModel

    from rankwise.trainer import Trainer, TrainingModule

_STATE = ("latest_update_step", "latest_update_epoch")


class WeightAveraging(Callback):
    """Average the weights over optimizer steps; validations and checkpoints have the average.

    `torch.optim.swa_utils.AveragedModel` computes it: the equal average by default. After `fit` the module
    has the average weights. A checkpoint has them in `state_dict`, and those that are trained in
    `current_model_state`, from which a run continues. Every rank averages the same weights; buffers are those
    of rank 0.

    Args:
        device: where the average is; by default where the module is.
        use_buffers: average the buffers too; otherwise the average has the module's.
        kwargs: other arguments of `AveragedModel`, such as `avg_fn` or `multi_avg_fn`.

    Attributes:
        latest_update_step: `global_step` at the last update after a step.
        latest_update_epoch: the epoch of the last update after an epoch.
    """

    def __init__(
        self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any
    ) -> None:
        self._device = device
        self._use_buffers = use_buffers
        self._kwargs = kwargs
        self._average: AveragedModel | None = None
        self._loaded: dict[str, Any] | None = None  # the average of the run that continues
        self._is_swapped = False
        self.latest_update_step = 0
        self.latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to add the present weights to the average; override it for other moments.

        Args:
            step_idx: the optimizer step that has ended, counted from 0; None at the end of an epoch.
            epoch_idx: the epoch that has ended; None after a step.
        """
        return step_idx is not None

    def _arguments(self) -> dict[str, Any]:
        """Return other arguments of `AveragedModel`."""
        return self._kwargs

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, int(state_dict[name]))

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        from torch.optim.swa_utils import AveragedModel

        if trainer.global_step == 0:  # a new run, perhaps of another module
            self.latest_update_step, self.latest_update_epoch = 0, -1
        device = trainer.strategy.root_device if self._device is None else torch.device(self._device)
        self._average = AveragedModel(
            module, device=device, use_buffers=self._use_buffers, **self._arguments()
        )
        if self._loaded is not None:
            self._average.module.load_state_dict(self._loaded["weights"])
            self._average.n_averaged.fill_(self._loaded["number"])
            self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self.latest_update_step and self.should_update(step_idx=step - 1):
            self._update(module)
            self.latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        epoch = trainer.current_epoch
        is_new = trainer.progress.is_epoch_done and epoch > self.latest_update_epoch
        if is_new and self.should_update(epoch_idx=epoch):
            self._update(module)
            self.latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Give the module the average weights."""
        self._swap(trainer, module)
        self._average, self._is_swapped = None, False

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._swap(trainer, module)

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self._swap(trainer, module)

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Give the module its own weights back, if a validation has failed."""
        if self._is_swapped:
            self._swap(trainer, module)
        self._average = self._loaded = None

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average is None:  # after the fit, when the module has the average
            return
        other = trainer.strategy.get_module_state_dict(self._average.module)
        current, average = (checkpoint["state_dict"], other)[:: -1 if self._is_swapped else 1]
        checkpoint["state_dict"] = average
        if "optimizer_states" in checkpoint:
            checkpoint["current_model_state"] = current
            checkpoint["averaging_state"] = {"n_averaged": self._average.n_averaged.clone()}

    def on_load_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue both: the average, and the weights that are trained."""
        if not trainer.is_fitting:  # an evaluation uses the average
            return
        weights, number = checkpoint["state_dict"], 0
        if "current_model_state" in checkpoint:
            number = checkpoint.get("averaging_state", {}).get("n_averaged")
            if not isinstance(number, Tensor):
                path = trainer.ckpt_path or ""
                raise CheckpointError(path=path, problem="holds no number of averaged weights")
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        self._loaded = {"weights": weights, "number": int(number)}

    def _update(self, module: nn.Module) -> None:
        if self._average is not None:
            self._average.update_parameters(module)

    @torch.no_grad()
    def _swap(self, trainer: Trainer, module: nn.Module) -> None:
        """Exchange the weights of the module and of the average. Collective when the module gets those."""
        if self._average is None:
            return
        averaged = self._average.module
        if not self._is_swapped and trainer.world_size > 1 and self._use_buffers:
            for buffer in averaged.buffers():
                buffer.copy_(trainer.strategy.broadcast(buffer))
        self._is_swapped = not self._is_swapped
        buffers = zip(averaged.buffers(), module.buffers(), strict=True) if self._use_buffers else ()
        parameters = zip(averaged.parameters(), module.parameters(), strict=True)
        for average, current in chain(parameters, buffers):
            kept = average.detach().clone()
            average.copy_(current)
            current.copy_(kept)

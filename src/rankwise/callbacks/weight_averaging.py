"""`WeightAveraging`: train one model, validate and keep the average of its weights; `EMAWeightAveraging`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.callbacks.base import Callback
from rankwise.checks import check_keywords, check_value
from rankwise.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from torch.optim.swa_utils import AveragedModel

    from rankwise.strategies import Strategy
    from rankwise.trainer import Trainer, TrainingModule

_ARGUMENTS = ("avg_fn", "multi_avg_fn")
_EMA_ARGUMENTS = (
    "device",
    "use_buffers",
    "decay",
    "update_every_n_steps",
    "update_starting_at_step",
    "update_starting_at_epoch",
)
_REMEDIES = dict.fromkeys(_ARGUMENTS, "WeightAveraging, which takes it.")
_STATE = ("latest_update_step", "latest_update_epoch")


class WeightAveraging(Callback):
    """Average the weights over optimizer steps; validations and checkpoints have the average.

    `torch.optim.swa_utils.AveragedModel` computes it: the equal average by default. After `fit` the module
    has the average weights. A checkpoint has the average in `state_dict`, and the trained weights, from which
    a run continues, in `current_model_state`. Every rank averages the same weights; buffers are rank 0's.

    Args:
        device: where the average is; by default where the module is.
        use_buffers: average the buffers too; otherwise the average has the module's.
        kwargs: other arguments of `AveragedModel`: `avg_fn` or `multi_avg_fn`.

    Raises:
        UnknownArgumentError: for other keywords.
        ConfigurationError: in `fit`, with post-local SGD.

    Attributes:
        latest_update_step: `global_step` at the last update after a step.
        latest_update_epoch: the epoch of the last update after an epoch.
    """

    def __init__(
        self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any
    ) -> None:
        check_keywords("WeightAveraging", kwargs, _ARGUMENTS)
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

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            check_same_weights(trainer.strategy, type(self).__name__)

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

    def module_to_evaluate(self, module: TrainingModule) -> nn.Module | None:
        """Return the average within a fit, unless the module has it, as in a validation."""
        if self._average is None or self._is_swapped:
            return None
        if not self._use_buffers:
            copy_tensors(module.buffers(), self._average.module.buffers())
        average: nn.Module = self._average.module
        return average

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average is None:  # after the fit, when the module has the average
            return
        current = self._average.module if self._is_swapped else module
        checkpoint["current_model_state"] = trainer.strategy.get_module_state_dict(current)
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
            broadcast_buffers(averaged, trainer.strategy)
        self._is_swapped = not self._is_swapped
        buffers = zip(averaged.buffers(), module.buffers(), strict=True) if self._use_buffers else ()
        parameters = zip(averaged.parameters(), module.parameters(), strict=True)
        for average, current in chain(parameters, buffers):
            kept = average.detach().clone()
            average.copy_(current)
            current.copy_(kept)


def check_same_weights(strategy: Strategy, callback: str) -> None:
    """Refuse an average of the weights where each rank has its own."""
    if not strategy.has_equal_models:
        raise ConfigurationError(
            message=f"{callback} cannot work with a strategy that averages models.",
            facts="between averages of the models, each rank has another one.",
            remedy="another strategy or comm_hook, or leave the callback out.",
        )


@torch.no_grad()
def copy_tensors(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy the values of tensors to as many others, of the same shapes."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def broadcast_buffers(module: nn.Module, strategy: Strategy) -> None:
    """Give all ranks rank 0's buffers, in one broadcast by way of the CPU. Collective."""
    copy_tensors(strategy.broadcast([buffer.cpu() for buffer in module.buffers()]), module.buffers())


@final
class EMAWeightAveraging(WeightAveraging):
    """Average weights exponentially: `average = decay * average + (1 - decay) * weights`.

    Args:
        device: where the average is; by default where the module is.
        use_buffers: average the buffers too.
        decay: from 0 to 1; how much of the average an update keeps.
        update_every_n_steps: update after every n-th optimizer step; 0 for never.
        update_starting_at_step: the first step that is averaged, counted from 0; None for all.
        update_starting_at_epoch: update after each epoch from this one on, too; None for never.

    Raises:
        InvalidArgumentError: for a `decay` outside of 0 to 1, or a negative number.
        UnknownArgumentError: for other keywords.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_value("decay", decay, 0.0 <= decay <= 1.0, "a number from 0 to 1")
        for name, number in (
            ("update_every_n_steps", update_every_n_steps),
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            check_value(name, number, number is None or number >= 0, "0 or more")
        check_keywords("EMAWeightAveraging", kwargs, _EMA_ARGUMENTS, _REMEDIES)
        super().__init__(device=device, use_buffers=use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def _arguments(self) -> dict[str, Any]:
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        return {"multi_avg_fn": get_ema_multi_avg_fn(self.decay)}

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            is_in_time = step_idx >= (self.update_starting_at_step or 0)
            return is_in_time and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first

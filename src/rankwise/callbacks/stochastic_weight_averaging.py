"""`StochasticWeightAveraging`: average the weights of the last epochs, at a learning rate of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.callbacks.base import Callback
from rankwise.callbacks.weight_averaging import broadcast_buffers, check_same_weights, copy_tensors
from rankwise.checks import check_choice, check_minimum
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from rankwise.ranks import warn

if TYPE_CHECKING:
    from torch.optim.swa_utils import SWALR, AveragedModel

    from rankwise.trainer import Trainer, TrainingModule


@final
class StochasticWeightAveraging(Callback):
    """Give the module, when `max_epochs` are done, the equal average of its weights in the last epochs.

    At the start of each epoch from `swa_epoch_start` on, the weights are added to the average. From then on
    `torch.optim.swa_utils.SWALR` sets the learning rates, instead of the module's schedulers. Validations and
    checkpoints have the weights that are trained, until the end. See Izmailov et al., "Averaging Weights
    Leads to Wider Optima and Better Generalization", 2018.

    Buffers are averaged like weights. For the exact statistics of batch normalisation call
    `torch.optim.swa_utils.update_bn(loader, module)` after `fit`.

    Args:
        swa_lrs: the learning rate to anneal to, or one for each parameter group.
        swa_epoch_start: the first epoch that is averaged, counted from 1 (int), or as a fraction of
            `max_epochs` (float).
        annealing_epochs: number of epochs to anneal over.
        annealing_strategy: `"cos"` or `"linear"`.
        avg_fn: computes `average, weights, number averaged so far -> average`; by default the equal average.
        device: where the average is; None for where the module is.

    Raises:
        InvalidArgumentError, InvalidTypeError: for arguments out of range.
        ConfigurationError: in `fit`, for endless training, post-local SGD, a number of optimizers other
            than one, and schedulers in manual optimization.
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        device: torch.device | str | None = torch.device("cpu"),  # noqa: B008  immutable
    ) -> None:
        rates = list(swa_lrs) if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]
        if not rates or not all(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            expected = "a positive number, or a list of them"
            raise InvalidArgumentError(argument="swa_lrs", value=swa_lrs, expected=expected)
        is_late = 0 <= swa_epoch_start <= 1 if isinstance(swa_epoch_start, float) else swa_epoch_start >= 1
        if not is_late:
            expected = "an epoch from 1 on, or a fraction from 0.0 to 1.0"
            raise InvalidArgumentError(argument="swa_epoch_start", value=swa_epoch_start, expected=expected)
        check_minimum("annealing_epochs", annealing_epochs, 0)
        check_choice("annealing_strategy", annealing_strategy, ("cos", "linear"))
        if avg_fn is not None and not callable(avg_fn):
            raise InvalidTypeError(argument="avg_fn", value=avg_fn, expected="a function")
        self._swa_lrs = rates
        self._swa_epoch_start = swa_epoch_start
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        self._avg_fn = avg_fn
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self.latest_update_epoch = -1
        self._average: AveragedModel | None = None
        self._scheduler: SWALR | None = None
        self._replaced: list[Any] = []
        self._loaded: dict[str, Any] = {}

    def swa_start(self, max_epochs: int) -> int:
        """Return the first epoch that is averaged, counted from 0."""
        start = self._swa_epoch_start
        return max(0, (int(max_epochs * start) if isinstance(start, float) else start) - 1)

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit" and (trainer.max_epochs is None or trainer.max_epochs < 0):
            raise ConfigurationError(
                message="StochasticWeightAveraging needs a number of epochs.",
                facts=f"max_epochs={trainer.max_epochs}.",
                remedy="Trainer(max_epochs=...).",
            )
        if stage == "fit":
            check_same_weights(trainer.strategy, "StochasticWeightAveraging")

    def state_dict(self) -> dict[str, Any]:
        if self._average is None or self._scheduler is None:
            return {}
        return {
            "latest_update_epoch": self.latest_update_epoch,
            "n_averaged": int(self._average.n_averaged),
            "average": self._average.module.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the optimizer exists."""
        if state_dict:
            self._loaded = {name: state_dict[name] for name in state_dict}
            self.latest_update_epoch = int(state_dict["latest_update_epoch"])

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        loaded, self._loaded = self._loaded, {}
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            raise ConfigurationError(
                message="StochasticWeightAveraging needs one optimizer, and at most one scheduler.",
                facts=f"the module has {len(trainer.optimizers)} optimizers, and "
                f"{len(trainer.lr_scheduler_configs)} schedulers.",
                remedy="WeightAveraging, which does not change learning rates.",
            )
        if trainer.lr_scheduler_configs and not module.automatic_optimization:
            raise ConfigurationError(
                message="StochasticWeightAveraging cannot replace a scheduler that the module steps itself.",
                facts=f"automatic_optimization of {type(module).__name__} is False.",
                remedy="WeightAveraging, which does not change learning rates.",
            )
        has_batch_norm = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        if has_batch_norm and trainer.is_global_zero:
            warn(
                "StochasticWeightAveraging averages the statistics of batch normalisation like weights. For "
                "exact ones call torch.optim.swa_utils.update_bn(loader, module) after fit.",
            )
        if loaded:
            average, scheduler = self._begin(trainer, module)
            average.module.load_state_dict(loaded["average"])
            average.n_averaged.fill_(loaded["n_averaged"])
            scheduler.load_state_dict(loaded["scheduler"])

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        epoch = trainer.current_epoch
        if epoch < self.swa_start(trainer.max_epochs or 0) or epoch <= self.latest_update_epoch:
            return
        average = self._average or self._begin(trainer, module)[0]
        average.update_parameters(module)
        self.latest_update_epoch = epoch

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if self._scheduler is not None and trainer.progress.is_epoch_done:
            self._scheduler.step()

    def _begin(self, trainer: Trainer, module: TrainingModule) -> tuple[AveragedModel, SWALR]:
        """Make the average, and let its scheduler replace the module's."""
        from torch.optim.swa_utils import SWALR, AveragedModel

        [optimizer] = trainer.optimizers
        rates = self._swa_lrs * len(optimizer.param_groups) if len(self._swa_lrs) == 1 else self._swa_lrs
        if len(rates) != len(optimizer.param_groups):
            expected = f"one rate, or one for each of {len(optimizer.param_groups)} parameter groups"
            raise InvalidArgumentError(argument="swa_lrs", value=self._swa_lrs, expected=expected)
        device = trainer.strategy.root_device if self._device is None else torch.device(self._device)
        average = AveragedModel(module, device=device, avg_fn=self._avg_fn, use_buffers=True)
        scheduler = SWALR(optimizer, rates, self._annealing_epochs, self._annealing_strategy)  # type: ignore[arg-type]  # checked
        self._average, self._scheduler, self._replaced = average, scheduler, trainer.lr_scheduler_configs
        trainer.lr_scheduler_configs = []
        return average, scheduler

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the states of the module's schedulers; the other scheduler's state is this callback's."""
        if self._scheduler is not None and "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in self._replaced]

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Give the module the average if the last epoch is done, and the trainer the module's schedulers."""
        if self._average is not None and trainer.current_epoch >= (trainer.max_epochs or 0):
            average = self._average.module
            copy_tensors(average.parameters(), module.parameters())
            copy_tensors(average.buffers(), module.buffers())
            broadcast_buffers(module, trainer.strategy)
        self._end(trainer)

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        if self._scheduler is not None:
            trainer.lr_scheduler_configs = self._replaced
        self._reset()

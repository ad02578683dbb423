"""Callbacks that average weights over optimizer steps, or the last epochs with learning rates of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from rankwise.callbacks.base import Callback
from rankwise.checks import check_callable, check_choice, check_keywords, check_minimum, check_value
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.ranks import warn

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer import Trainer, TrainingModule

_ARGUMENTS = ("avg_fn", "multi_avg_fn")
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
            _check_same_weights(trainer.strategy, type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, int(state_dict[name]))

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
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

    on_validation_epoch_end = on_validation_epoch_start

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
            _copy_tensors(module.buffers(), self._average.module.buffers())
        return self._average.module

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


def _check_same_weights(strategy: Strategy, callback: str) -> None:
    """Refuse an average of the weights where each rank has its own."""
    if not strategy.has_equal_models:
        raise ConfigurationError(
            message=f"{callback} cannot work with a strategy that averages models.",
            facts="between averages of the models, each rank has another one.",
            remedy="another strategy or comm_hook, or leave the callback out.",
        )


@torch.no_grad()
def _copy_tensors(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy the values of tensors to as many others, of the same shapes."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def broadcast_buffers(module: nn.Module, strategy: Strategy) -> None:
    """Give all ranks rank 0's buffers, in one broadcast by way of the CPU. Collective."""
    _copy_tensors(strategy.broadcast([buffer.cpu() for buffer in module.buffers()]), module.buffers())


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
        numbers = {
            "update_every_n_steps": update_every_n_steps,
            "update_starting_at_step": update_starting_at_step,
            "update_starting_at_epoch": update_starting_at_epoch,
        }
        for name, number in numbers.items():
            check_value(name, number, number is None or number >= 0, "0 or more")
        known = ("device", "use_buffers", "decay", *numbers)
        check_keywords("EMAWeightAveraging", kwargs, known, _REMEDIES)
        super().__init__(device=device, use_buffers=use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def _arguments(self) -> dict[str, Any]:
        return {"multi_avg_fn": get_ema_multi_avg_fn(self.decay)}

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            is_in_time = step_idx >= (self.update_starting_at_step or 0)
            return is_in_time and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first


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
        are_valid = rates and all(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
        check_value("swa_lrs", swa_lrs, are_valid, "a positive number, or a list of them")
        is_late = 0 <= swa_epoch_start <= 1 if isinstance(swa_epoch_start, float) else swa_epoch_start >= 1
        expected = "an epoch from 1 on, or a fraction from 0.0 to 1.0"
        check_value("swa_epoch_start", swa_epoch_start, is_late, expected)
        check_minimum("annealing_epochs", annealing_epochs, 0)
        check_choice("annealing_strategy", annealing_strategy, ("cos", "linear"))
        if avg_fn is not None:
            check_callable("avg_fn", avg_fn)
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
        if stage != "fit":
            return
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise ConfigurationError(
                message="StochasticWeightAveraging needs a number of epochs.",
                facts=f"max_epochs={trainer.max_epochs}.",
                remedy="Trainer(max_epochs=...).",
            )
        _check_same_weights(trainer.strategy, "StochasticWeightAveraging")

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
            self._loaded = dict(state_dict)
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
        [optimizer] = trainer.optimizers
        rates = self._swa_lrs * len(optimizer.param_groups) if len(self._swa_lrs) == 1 else self._swa_lrs
        expected = f"one rate, or one for each of {len(optimizer.param_groups)} parameter groups"
        check_value("swa_lrs", self._swa_lrs, len(rates) == len(optimizer.param_groups), expected)
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
            _copy_tensors(average.parameters(), module.parameters())
            _copy_tensors(average.buffers(), module.buffers())
            broadcast_buffers(module, trainer.strategy)
        self._end(trainer)

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        if self._scheduler is not None:
            trainer.lr_scheduler_configs = self._replaced
        self._reset()

"""`LearningRateFinder`: try rising learning rates before a fit, and set one at which the loss falls."""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rankwise.callbacks.base import Callback, PreparingCallback
from rankwise.checks import check_installed, check_minimum, check_value
from rankwise.errors import ConfigurationError, text_of
from rankwise.ranks import rank_zero_only, warn
from rankwise.seed import get_random_state, set_random_state

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

_log = logging.getLogger(__name__)
_SMOOTHING = 0.98
_CPU = torch.device("cpu")
_warn = rank_zero_only(warn)
_OPTIONS = {
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "on_nonfinite": None,  # a high learning rate gives losses that are not
    "detect_anomaly": False,
    "enable_autolog_hparams": False,
}


@final
@dataclass(eq=False, repr=False)
class LearningRateCurve:
    """The learning rates of a search, and the losses that they gave.

    Attributes:
        mode, lr_min, lr_max, num_training: the arguments of the search; it may stop before `lr_max`.
        results: `"lr"`, the learning rate of each step, and `"loss"`, the smoothed loss after it.
    """

    mode: str
    lr_min: float
    lr_max: float
    num_training: int
    results: dict[str, list[float]] = field(init=False, default_factory=lambda: {"lr": [], "loss": []})

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the loss falls most steeply; None with less than two losses.

        Args:
            skip_begin: how many steps to leave out at the beginning.
            skip_end: how many to leave out at the end.
        """
        steepest = self._steepest(skip_begin, skip_end)
        return None if steepest is None else self.results["lr"][steepest]

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        rates, losses = self.results["lr"], self.results["loss"]
        steps = range(len(losses))[skip_begin : len(losses) - skip_end]
        finite = [step for step in steps if math.isfinite(losses[step])]
        if len(finite) < 2:
            return None
        at = torch.tensor([rates[step] for step in finite])
        [slopes] = torch.gradient(torch.tensor([losses[step] for step in finite]), spacing=[at])
        return finite[int(torch.argmin(slopes))]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the losses over the learning rates; return matplotlib's figure.

        Args:
            suggest: mark the suggestion.
            show: show the figure.
            ax: matplotlib's axes to draw into; by default a new figure's.

        Raises:
            MissingExtraError: if matplotlib is not installed.
        """
        if ax is None:
            ax = _pyplot().subplots()[1]
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        steepest = self._steepest(10, 1) if suggest else None
        if steepest is not None:
            point = self.results["lr"][steepest], self.results["loss"][steepest]
            ax.plot(*point, markersize=10, marker="o", color="red")
        if show:
            _pyplot().show()
        return ax.figure


def _pyplot() -> Any:
    check_installed("matplotlib", "plot", "LearningRateCurve.plot()")
    import matplotlib.pyplot as plt

    return plt


class LearningRateFinder(PreparingCallback):
    """Before `fit` begins a run, search its learning rate, and set it in the module.

    A copy of the module is trained with a learning rate that rises from step to step, in a fit of its own,
    without callbacks, loggers and validation. Losses are averaged over the ranks, so all ranks get the same
    suggestion. Module, optimizers, random state and progress are restored afterwards. Loaders and data
    modules are used twice, and so `prepare_data` and `setup` are called twice. A fit that continues keeps its
    learning rate.

    Args:
        min_lr: the first learning rate.
        max_lr: the last one.
        num_training_steps: how many optimizer steps are tried.
        mode: `"exponential"` or `"linear"`: how the learning rate rises.
        early_stop_threshold: end the search at a loss of more than this times the lowest one; None for not.
        update_attr: set the suggestion in the module and in its `hparams`, where `configure_optimizers` reads
            it.
        attr_name: the name of the attribute, or hyperparameter; by default `lr` or `learning_rate`.

    Attributes:
        optimal_lr: the `LearningRateCurve` of the last search; None before.

    Raises:
        InvalidArgumentError: for arguments out of range.
        ConfigurationError: in `fit`, for a module without that attribute, or with manual optimisation, and
            one that cannot be copied.
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        check_value("mode", mode, mode.lower() in ("exponential", "linear"), "'exponential' or 'linear'")
        check_value("min_lr", min_lr, 0 < min_lr < max_lr, f"more than 0, less than max_lr={max_lr}")
        check_minimum("num_training_steps", num_training_steps, 1)
        self._range = mode.lower(), float(min_lr), float(max_lr), num_training_steps
        self._early_stop_threshold = early_stop_threshold
        self._update_attr = update_attr
        self._names = [attr_name] if attr_name else ["lr", "learning_rate"]
        self.optimal_lr: LearningRateCurve | None = None

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:
            return
        name = type(module).__name__
        if not module.automatic_optimization:
            raise ConfigurationError(
                message=f"LearningRateFinder cannot step the optimizers of {name}.",
                facts=f"{name}.automatic_optimization is False.",
                remedy="leave the LearningRateFinder out.",
            )
        if self._update_attr and self._attribute_of(module) is None:
            raise ConfigurationError(
                message=f"LearningRateFinder finds no learning rate to set in {name}.",
                facts=f"neither the module nor its hparams have {' or '.join(map(repr, self._names))}.",
                remedy='attr_name="...", or update_attr=False.',
            )

    def _attribute_of(self, module: TrainingModule) -> str | None:
        # why: the attribute is the user's own
        return next((name for name in self._names if name in module.hparams or hasattr(module, name)), None)

    def prepare_run(
        self, trainer: Trainer, module: TrainingModule, train_dataloaders: Any, datamodule: Any
    ) -> None:
        """Search."""
        self.lr_find(trainer, module, train_dataloaders, datamodule)

    def lr_find(
        self, trainer: Trainer, module: TrainingModule, train_dataloaders: Any = None, datamodule: Any = None
    ) -> None:
        """Search now; `fit` calls this, outside of its processes. Collective under torchrun and srun.

        Raises:
            ConfigurationError: within a stage, and as in `fit`.
        """
        self.check_stage(trainer, module, "fit")
        if trainer.is_fitting:
            raise ConfigurationError(
                message="LearningRateFinder.lr_find() was called within a fit.",
                facts="it is a fit of its own.",
                remedy="call it before, or leave it to the callback.",
            )
        if trainer.fast_dev_run:
            _warn("LearningRateFinder does not search in a trial run (fast_dev_run).")
            return
        test = _RangeTest(LearningRateCurve(*self._range), self._early_stop_threshold)
        precision = trainer.strategy.precision
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            stack.callback(precision.load_state_dict, precision.state_dict())  # the scale of losses
            stack.callback(set_random_state, get_random_state(_CPU), _CPU)
            copied = _copy_of(module)
            trial = trainer.trial(copied, test, default_root_dir=folder, **_OPTIONS)
            trial.fit(copied, train_dataloaders, datamodule=datamodule)
        self.optimal_lr = test.curve
        if self._update_attr:
            self._update(module, test.curve)

    def _update(self, module: TrainingModule, curve: LearningRateCurve) -> None:
        rate, name = curve.suggestion(), self._attribute_of(module)
        if rate is None or name is None:
            _warn(
                f"LearningRateFinder suggests no learning rate after {len(curve.results['loss'])} steps: 13 "
                "are needed, with finite losses. Raise num_training_steps, or lower max_lr."
            )
            return
        if name in module.hparams:
            module.hparams[name] = rate
        if hasattr(module, name):  # why: the attribute is the user's own
            setattr(module, name, rate)
        rank_zero_only(_log.info)("LearningRateFinder: %s = %g", name, rate)


@final
class _RangeTest(Callback):
    """Raise the learning rate from step to step, and note the losses."""

    def __init__(self, curve: LearningRateCurve, threshold: float | None) -> None:
        self.curve = curve
        self._threshold = threshold
        self._average = self._lowest = 0.0
        self._schedulers: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return self.curve.results

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve.results = {name: list(values) for name, values in state_dict.items()}

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._schedulers, trainer.lr_scheduler_configs = trainer.lr_scheduler_configs, []
        trainer.min_epochs = trainer.min_steps = 0
        trainer.max_epochs = trainer.max_steps = -1  # only now: configure_optimizers may have read them

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.progress.window_batches:
            return
        rate = self._next_rate()
        self.curve.results["lr"].append(rate)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def _next_rate(self) -> float:
        """Return `lr_min`, and from the second step on, as Lightning does, the part of the way after it."""
        curve, number = self.curve, len(self.curve.results["lr"])
        part = (number + 1) / curve.num_training if number else 0.0
        if curve.mode == "linear":
            return curve.lr_min + part * (curve.lr_max - curve.lr_min)
        return curve.lr_min * math.pow(curve.lr_max / curve.lr_min, part)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.progress.window_batches:
            return
        losses = self.curve.results["loss"]
        number = len(losses) + 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * _mean_loss(trainer, outputs)
        loss = self._average / (1 - _SMOOTHING ** (number + 1))  # as Lightning corrects it
        limit = None if self._threshold is None else self._threshold * self._lowest
        is_diverging = number > 1 and limit is not None and loss > limit
        if is_diverging or number == self.curve.num_training:
            trainer.should_stop = True
        if number == 1 or loss < self._lowest:
            self._lowest = loss
        losses.append(loss)

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        trainer.lr_scheduler_configs = self._schedulers


def _mean_loss(trainer: Trainer, outputs: Any) -> float:
    """Return the mean of the ranks' losses. Collective."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    own = loss.detach().double() if isinstance(loss, Tensor) else torch.tensor(math.nan, dtype=torch.double)
    return float(trainer.strategy.all_reduce(own.to(trainer.strategy.root_device), reduce_op="mean").item())


def _copy_of(module: TrainingModule) -> TrainingModule:
    """Copy a module, but not the data that it holds."""
    data = [
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, (Dataset, DataLoader))
    ]
    try:
        return copy.deepcopy(module, {id(each): each for each in data})
    except Exception as error:
        raise ConfigurationError(
            message=f"LearningRateFinder cannot copy {type(module).__name__}.",
            facts=f"copy.deepcopy raises {type(error).__name__}: {text_of(error)}",
            remedy="make what cannot be copied in setup(), or leave LearningRateFinder out.",
        ) from error

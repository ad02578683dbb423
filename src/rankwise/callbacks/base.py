"""`Callback`: the hooks that a trainer calls; base classes of callbacks; `LambdaCallback`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from rankwise.checks import check_callable, check_choice, check_keywords
from rankwise.errors import ConfigurationError, LifecycleError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule

_module_of_stage: ContextVar[TrainingModule | None] = ContextVar("module_of_stage", default=None)


@contextmanager
def logging_through(module: TrainingModule) -> Iterator[None]:
    """Let callbacks log through a module in the block, in which its stage runs."""
    token = _module_of_stage.set(module)
    try:
        yield
    finally:
        _module_of_stage.reset(token)


class Callback:
    """Base class of callbacks: subclass it and override the hooks you need.

    Every hook runs on every rank, before the module's hook of the same name. A stage is `"fit"`,
    `"validate"`, `"test"` or `"predict"`.
    """

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint; override it to use a callback twice."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints and for the calling process: plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value in a hook, as the module's `log` does; see `TrainingModule.log`.

        Raises:
            LifecycleError: outside of a stage.
        """
        self.log_dict({name: value}, *args, **options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several values with the same options; see `log`."""
        module = _module_of_stage.get()
        if module is None:
            raise LifecycleError(
                f"{type(self).__name__}.log",
                state="no stage",
                needed="one that runs",
                remedy="log in a hook, such as on_train_batch_end.",
            )
        module.log_dict(dictionary, *args, **options)

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Raise if this callback cannot work in a stage; called before any process of the stage starts."""

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Called when a stage begins: the process group exists, the module is not wrapped yet."""

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Called when a stage ends, also after an exception."""

    def on_exception(self, trainer: Trainer, module: TrainingModule, exception: BaseException) -> None:
        """Called when a stage raises on this rank."""

    def module_to_evaluate(self, module: TrainingModule) -> nn.Module | None:
        """Return the module to save in checkpoints in place of `module`; None for `module` itself."""
        return None

    def on_save_checkpoint(
        self, trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called before a checkpoint is written, or after one was read; may change it."""

    on_load_checkpoint = on_save_checkpoint

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called when model, optimizers and loaders are ready."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called before the validation that `num_sanity_val_steps` runs before training, and after it."""

    on_sanity_check_end = on_sanity_check_start

    def on_fit_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called at the end of `fit`."""

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called after an epoch and the validation at its end."""

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        """Called before a training batch."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch; `outputs` is the result of `training_step`, as a dictionary.

        Its `"loss"` is detached, and divided by `accumulate_grad_batches`.
        """

    def on_before_zero_grad(self, trainer: Trainer, module: TrainingModule, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, module: TrainingModule, loss: Tensor) -> None:
        """Called before the gradients of `loss` are computed."""

    def on_after_backward(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called after backward; an accumulation's last backward averages gradients over the ranks."""

    def on_before_optimizer_step(
        self, trainer: Trainer, module: TrainingModule, optimizer: Optimizer
    ) -> None:
        """Called before the optimizer steps; gradients are unscaled, and not clipped yet."""

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called before the first batch of an evaluation (or prediction)."""

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called after an evaluation, when its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called after `on_validation_start`, before the batches."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        """Called after the last batch; values logged here are still reduced with the others."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch; in prediction `batch_idx` counts this rank's batches."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch; `outputs` is the result of the step."""

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


class PreparingCallback(Callback):
    """Works before `fit` begins a run, in the calling process; not before one that continues."""

    def prepare_run(
        self, trainer: Trainer, module: TrainingModule, train_dataloaders: Any, datamodule: Any
    ) -> None:
        """Prepare the run, such as by fits of its own."""


class MonitoringCallback(Callback):
    """Call `on_metrics_ready` after every validation, or after every epoch without validation.

    After a validation at the end of an epoch, the call comes when the epoch's own metrics exist too. The
    Trainer runs these callbacks after all others.

    Args:
        monitor: name of a logged metric, or None.
        mode: `"min"` or `"max"`: whether lower or higher values are better.
        at_epoch_end: True for a call after every epoch, and at no other time; False for one after every
            validation, and at no other time.

    Attributes:
        epoch_end_argument: the name of `at_epoch_end` in a subclass, for messages.

    Raises:
        InvalidArgumentError: if `mode` is something else.
        ConfigurationError: in `fit`, for `at_epoch_end=False` without validation.
    """

    epoch_end_argument = "at_epoch_end"

    def __init__(self, monitor: str | None, mode: str, at_epoch_end: bool | None = None) -> None:
        check_choice("mode", mode, ("min", "max"))
        self.monitor = monitor
        self.mode = mode
        self._at_epoch_end = at_epoch_end
        self._acted_at: tuple[int, int] | None = None  # epoch and batch of a validation within the epoch

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        if self._at_epoch_end is False and not trainer.has_validation:
            name = f"{type(self).__name__}({self.epoch_end_argument}=False)"
            raise ConfigurationError(
                message=f"{name} would never act: it waits for validations.",
                facts="this fit has no validation.",
                remedy=f"val_dataloaders=... and a validation_step, or leave out {self.epoch_end_argument}.",
            )

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Act on the metric; subclasses override it. Runs on every rank."""

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        is_due = trainer.is_fitting and not trainer.sanity_checking and not trainer.progress.is_epoch_done
        if is_due and self._at_epoch_end is not True:
            self._acted_at = trainer.current_epoch, trainer.progress.batches_done
            self.on_metrics_ready(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        acted_at, self._acted_at = self._acted_at, None
        if acted_at == (trainer.current_epoch, trainer.progress.batches_done):
            return  # training stops right after that validation
        is_due = self._at_epoch_end
        if is_due is None:
            is_due = not trainer.has_validation or self.monitor is None
        if is_due or trainer.progress.is_validated:
            self.on_metrics_ready(trainer, module)

    @property
    def worst(self) -> float:
        """The score that is worse than every other."""
        return math.inf if self.mode == "min" else -math.inf

    def is_better(self, score: float, other: float, min_delta: float = 0.0) -> bool:
        """Return whether `score` is better than `other` by more than `min_delta`."""
        return score < other - min_delta if self.mode == "min" else score > other + min_delta

    def monitored_value(self, trainer: Trainer) -> float | None:
        """Return the metric's value on this rank, or None if it was not logged."""
        value = trainer.callback_metrics.get(self.monitor or "")
        return None if value is None else float(value)

    def missing_metric(self, trainer: Trainer) -> ConfigurationError:
        """Return the error for a metric that was not logged."""
        names = sorted(trainer.callback_metrics)
        logged = ", ".join(map(repr, names)) or "nothing"
        near = nearest(self.monitor or "", names)
        suggestion = "" if near is None else f" Did you mean {near!r}?"
        return ConfigurationError(
            message=f"{type(self).__name__}(monitor={self.monitor!r}) finds no such metric.{suggestion}",
            facts=f"logged so far: {logged}.",
            remedy=f'self.log("{self.monitor}", value) in a step of the module, or another monitor.',
        )


_NO_HOOKS = ("check_stage", "state_dict", "load_state_dict")


@final
class LambdaCallback(Callback):
    """Call functions as hooks: `LambdaCallback(on_train_start=lambda trainer, module: print("go"))`.

    Args:
        hooks: a function for each hook, by the hook's name, or None. It gets the hook's arguments
            without `self`.

    Raises:
        UnknownArgumentError: for a name that is not a hook of `Callback`.
        InvalidTypeError: for a value that cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = tuple(
            name
            for name, value in vars(Callback).items()
            if callable(value) and not name.startswith("_") and name not in _NO_HOOKS
        )
        check_keywords("LambdaCallback", hooks, known)
        for name, function in hooks.items():
            if function is not None:
                check_callable(name, function)
                setattr(self, name, function)

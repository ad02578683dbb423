"""`TrainingModule`: the base class of modules that the Trainer trains, with the default hooks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise import ranks
from rankwise.checks import check_choice
from rankwise.errors import InvalidArgumentError, InvalidTypeError, LifecycleError
from rankwise.hyperparameters import HyperparametersMixin
from rankwise.trainer.data.data_module import DataHooks, is_own, undefined
from rankwise.trainer.metrics.metric_objects import items_of
from rankwise.trainer.module_loading import LoadFromCheckpoint, load_from_checkpoint

if TYPE_CHECKING:
    from rankwise.loggers import Logger
    from rankwise.trainer import Trainer


def _of_trainer(name: str, default: Any = 0) -> Any:
    """Return a property that reads `name`, an attribute of the module's trainer; `default` without one."""
    read = operator.attrgetter(name)
    return property(lambda module: default if module._trainer is None else read(module._trainer))


class TrainingModule(HyperparametersMixin, DataHooks, nn.Module):
    """The module that a `Trainer` trains; subclass it and define `training_step` and `configure_optimizers`.

    A hook that callbacks have too runs after theirs; `Callback` describes when. Stages are `"fit"`,
    `"validate"`, `"test"` and `"predict"`.

    Example:
        >>> class Line(TrainingModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(1, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(self.layer(x), y)
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)

    For several optimizers, or steps at any time, set `self.automatic_optimization = False` in `__init__`;
    `training_step` then runs backward passes and steps itself:

        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()

    The methods that this needs raise `LifecycleError` in other stages and in automatic optimisation.

    Attributes:
        automatic_optimization: whether the Trainer runs backward and steps the optimizer.
        example_input_array: an example of the input of `forward`, if you set it, for
            `TensorBoardLogger(log_graph=True)`.
        strict_loading: whether it is an error, not a warning, if the names of a checkpoint's weights differ
            from the module's.
        global_rank, local_rank: this process's ids in the whole job and on its node; 0 without a trainer.
        current_epoch: the number of the current epoch; 0 without a trainer.
        global_step: completed optimizer steps; 0 without a trainer.
        logger: the trainer's first logger; None without any. The object in which its library records, for
            images and the like, is `self.logger.experiment`.
    """

    automatic_optimization: bool = True
    example_input_array: Any = None
    strict_loading: bool = True
    load_from_checkpoint = LoadFromCheckpoint(load_from_checkpoint)

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._weight: Tensor | float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy without the trainer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        return {**state, "_trainer": None}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the loss of a batch, or a mapping with `"loss"` in it.

        None skips the batch, which works with one process only. With `automatic_optimization = False` the
        return value is ignored: call `manual_backward` and step `self.optimizers()` here.
        """
        raise undefined(self, "training_step")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a validation batch, and `log` the results.

        With several loaders there is a third argument, `dataloader_idx`; also in `test_step` and
        `predict_step`.
        """
        raise undefined(self, "validation_step")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a test batch, and `log` the results."""
        raise undefined(self, "test_step")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the predictions for a batch, of any type; tensors are moved to the CPU."""
        return self(batch)

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of them, which are added to the trainer's; called in each stage.

        A callback of the same class as one of the trainer's, or of a derived class, replaces that one. If
        an earlier call for this module has returned callbacks of its class, those stay instead.
        """
        return []

    def configure_model(self) -> None:
        """Create layers; called on every rank in every stage, so keep those that exist already."""

    def configure_optimizers(self) -> Any:
        """Return an optimizer, `[optimizer]`, `([optimizer], [scheduler])` or a dictionary.

        A dictionary has `"optimizer"` and perhaps `"lr_scheduler"`: a scheduler, or a dictionary with
        `"scheduler"`, `"interval"` (`"epoch"` or `"step"`), `"frequency"` and `"monitor"`. None, the
        default, trains nothing. With `automatic_optimization = False` there may be several optimizers.
        """
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, or after one was read; may change it."""

    on_load_checkpoint = on_save_checkpoint

    def on_fit_start(self) -> None:
        """Called at the moment that its name states; `Callback` describes this and the following hooks."""

    on_fit_end = on_train_start = on_train_end = on_fit_start
    on_train_epoch_start = on_train_epoch_end = on_fit_start
    on_validation_start = on_validation_end = on_fit_start
    on_validation_epoch_start = on_validation_epoch_end = on_fit_start
    on_test_start = on_test_end = on_test_epoch_start = on_test_epoch_end = on_fit_start
    on_predict_start = on_predict_end = on_predict_epoch_start = on_predict_epoch_end = on_fit_start

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a training batch; -1, on any rank, ends the epoch on all without this batch.

        With several ranks, a module that defines this hook costs an exchange between them for each batch.
        """
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training batch; `outputs` are what `training_step` returned, as a dictionary."""

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: TrainerOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer of automatic optimisation, at the end of an accumulation window.

        Collective: every rank must call the closure, equally often. `optimizer.step(optimizer_closure)` calls
        it, then `on_before_optimizer_step`, clips gradients and steps.

        Args:
            epoch: the number of the epoch.
            batch_idx: the number of the window's last batch.
            optimizer: steps in the trainer's precision.
            optimizer_closure: runs `training_step`, clears the gradients if the window has no earlier batch,
                runs backward, and returns the loss.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients, before the backward pass of an accumulation window's first batch."""
        self.trainer.strategy.precision.zero_grad(optimizer)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss, which is weighted and scaled already."""
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the unscaled gradients of automatic optimisation; the Trainer's arguments, None for none."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler of automatic optimisation; `metric` is what a `ReduceLROnPlateau` monitors."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def on_validation_model_zero_grad(self) -> None:
        """Clear the gradients before a validation within `fit`; called only where a subclass overrides it."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Set the mode for an evaluation."""
        self.eval()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval

    def on_validation_model_train(self) -> None:
        """Set the mode after an evaluation; without an override, each submodule gets its former one."""
        self.train()

    on_test_model_train = on_validation_model_train

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

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number or a metric object.

        Args:
            name: its name in `trainer.callback_metrics` and for loggers; `"step"` and `"epoch"` replace the
                numbers of step and epoch that loggers get.
            value: a number, a tensor with one element, or a metric object of torchmetrics that is a
                submodule: its epoch's value is computed over all ranks, then it is reset.
            prog_bar: whether the progress bar shows it.
            logger: whether loggers get it; None means True.
            on_step: whether each step's value is logged; by default only in training batches, and of a metric
                object that was called with the batch. Loggers get the epoch's last value after every
                `log_every_n_steps` steps, and the values of an evaluation's steps at its end. With
                `sync_dist` each training step has one more collective; if an epoch's first step logs no such
                value, later ones wait for a step that loggers get.
            on_epoch: whether the values are reduced over the epoch; by default in evaluation, and if
                `on_step` is false.
            reduce_fx: `"mean"` (weighted by batch size), `"sum"`, `"min"` or `"max"`, or torch's function.
            enable_graph: only False is accepted: logged values have no gradients.
            sync_dist: whether values are reduced over the ranks too; by default only those of an
                evaluation's end. A metric object's step value is always this rank's.
            sync_dist_group: a process group of this rank, over which to reduce instead of all ranks.
            add_dataloader_idx: whether the name gets the number of the loader, if there are several.
            batch_size: the weight of this value in a mean; by default the number of samples in the batch.
            metric_attribute: the name of the submodule that is the metric object, which is found without it.
            rank_zero_only: whether only global rank 0 logs it. The other ranks need not call this, and get an
                epoch's value, but not the steps' values.

        Collective: with `sync_dist`, every rank must log the same names in the same steps.

        Raises:
            InvalidTypeError, UnknownNameError: when it is not one number, or for another `reduce_fx`.
            ConfigurationError: for options that contradict each other or another call with this name, or that
                a metric object does not have; in a mean without `batch_size`, if the number of samples is not
                    known (for loaders without automatic batches, and loaders that are not a `DataLoader` or
                    change its batches).
            LifecycleError: outside of the loops of a trainer, in prediction, and after the epoch's end.
        """
        check_choice("enable_graph", enable_graph, (False,))
        if metric_attribute is not None and dict(self.named_modules()).get(metric_attribute) is not value:
            expected = f"the name of the submodule that is the value of log({name!r})"
            raise InvalidArgumentError(argument="metric_attribute", value=metric_attribute, expected=expected)
        trainer = self.trainer
        if trainer.barebones:
            return
        trainer._stage.open_results.log(
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            sync_dist=sync_dist,
            sync_dist_group=sync_dist_group,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            rank_zero_only=rank_zero_only,
        )

    def log_dict(self, dictionary: Mapping[str, Any] | nn.ModuleDict, *args: Any, **kwargs: Any) -> None:
        """Log several numbers or metric objects (also a `MetricCollection`) with the same options."""
        for name, value in items_of(dictionary):
            self.log(name, value, *args, **kwargs)

    def log_weight(self, weight: Tensor | float) -> None:
        """Set the weight of this training batch, for example the number of tokens in its mean loss.

        Needs `DDPStrategy(gradient_weighting="logged")`: the gradients of an optimizer step are then the
        average over all its batches on all ranks, each weighted by this number. Returning
        `{"loss": loss, "weight": weight}` from `training_step` does the same.

        Args:
            weight: a number that is not negative, or a tensor with one.
        """
        self._weight = weight

    def take_weight(self) -> Tensor | float | None:
        """Return the last argument of `log_weight` since the last call of this; None for none."""
        if (weight := self._weight) is not None:  # assigning an attribute of a module is slow
            self._weight = None
        return weight

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them if there is not exactly one.

        In manual optimisation their `step` and `zero_grad` use the trainer's precision. With
        `use_pl_optimizer=False` torch's own optimizers are returned, which do not.
        """
        running = self.trainer.running_manual_optimization if use_pl_optimizer else None
        return _one_or_all(self.trainer.optimizers if running is None else running.optimizers)

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, or the list of them if there is not exactly one.

        In manual optimisation the Trainer does not step them.
        """
        return _one_or_all([config.scheduler for config in self.trainer.lr_scheduler_configs])

    def manual_backward(self, loss: Tensor, weight: float | Tensor | None = None, **options: Any) -> None:
        """Compute gradients of `loss`, and average them over the ranks.

        Collective: every rank must call this, equally often.

        Args:
            loss: a mean, over tokens for example.
            weight: with `gradient_weighting="logged"`, the number of items of that mean; may be 0.
            options: `Tensor.backward`'s.

        Raises:
            ConfigurationError: when a weight is missing, or cannot be used.
        """
        self.trainer.manual_optimization.backward(loss, weight, **options)

    def no_backward_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a block in which `manual_backward` leaves gradients as they are on this rank.

        This accumulates gradients: the first backward pass after the block averages their sum.
        """
        return self.trainer.manual_optimization.blocked(enabled)

    def toggle_optimizer(self, optimizer: TrainerOptimizer | Optimizer) -> None:
        """Make only this optimizer's parameters require gradients: less to compute and to average."""
        self.trainer.manual_optimization.toggle(_plain(optimizer))

    @contextmanager
    def toggled_optimizer(self, optimizer: TrainerOptimizer | Optimizer) -> Iterator[None]:
        """Toggle an optimizer for the block; see `toggle_optimizer`."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def untoggle_optimizer(self, optimizer: TrainerOptimizer | Optimizer | None = None) -> None:
        """Undo `toggle_optimizer`."""
        self.trainer.manual_optimization.untoggle()

    def clip_gradients(
        self,
        optimizer: TrainerOptimizer | Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip an optimizer's unscaled gradients.

        Args:
            optimizer: the optimizer of the gradients.
            gradient_clip_val: the limit, 0 for no clipping; None for the Trainer's.
            gradient_clip_algorithm: `"norm"` or `"value"`; None for the Trainer's, or else `"norm"`.

        Raises:
            InvalidArgumentError: for another algorithm.
        """
        precision, options = self.trainer.strategy.precision, self.trainer.options
        limit = options.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or options.gradient_clip_algorithm or "norm"
        check_choice("gradient_clip_algorithm", algorithm, ("norm", "value"))
        if limit and algorithm == "norm":
            precision.clip_gradients_norm(_plain(optimizer), limit)
        elif limit:
            precision.clip_gradients_value(_plain(optimizer), limit)

    @property
    def trainer(self) -> Trainer:
        """The trainer that last used this module."""
        if self._trainer is None:
            remedy = f"Trainer(...).fit({type(self).__name__}(...), loader)"
            raise LifecycleError(
                f"{type(self).__name__}.trainer", state="no trainer", needed="a Trainer", remedy=remedy
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        for part in self.modules():  # a module within this one has the same trainer
            if isinstance(part, TrainingModule):
                part._trainer = trainer

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer."""
        first = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first parameter or buffer of floating-point numbers."""
        tensors = chain(self.parameters(), self.buffers())
        floating = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        return next(floating, torch.get_default_dtype())

    def freeze(self) -> None:
        """Stop training all parameters, and switch to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Train all parameters, and switch to training mode."""
        self.requires_grad_(True)
        self.train()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on global rank 0 only, with the arguments of Python's `print`."""
        ranks.rank_zero_only(print)(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of one shape from every rank.

        Collective: every rank must call this, in the same order.

        Args:
            data: a tensor of shape `(*)`, a number or an array, or nested containers of these.
            group: the process group to gather from; by default all ranks.
            sync_grads: whether gradients flow back to the rank that a slice came from.

        Returns:
            `data` with tensors of shape `(world_size, *)` on this rank's device; in a trainer without a
            process group, `data` as tensors.
        """
        return self.trainer.strategy.all_gather(data, group, sync_grads)

    global_rank: int = _of_trainer("global_rank")
    local_rank: int = _of_trainer("local_rank")
    current_epoch: int = _of_trainer("current_epoch")
    global_step: int = _of_trainer("global_step")
    logger: Logger | None = _of_trainer("logger", None)

    @property
    def loggers(self) -> list[Logger]:
        """All of the trainer's loggers; none without a trainer."""
        return [] if self._trainer is None else self._trainer.loggers


def no_module(model: Any) -> InvalidTypeError:
    """Return the error for an object that is not a `TrainingModule`."""
    is_compiled = type(model).__name__ == "OptimizedModule"
    remedy = "for torch.compile(model): model.compile(), and fit(model)" if is_compiled else ""
    expected = "an instance of TrainingModule"
    return InvalidTypeError(argument="model", value=model, expected=expected, remedy=remedy)


@final
class TrainerOptimizer:
    """An optimizer whose `step` and `zero_grad` use the trainer's precision; the rest is torch's own."""

    def __init__(self, optimization: Any, optimizer: Optimizer) -> None:
        self._optimization = optimization
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters once, in the trainer's precision; return what the optimizer returns.

        Args:
            closure: computes gradients and returns the loss. The optimizer gets the mean over the ranks,
                weighted as in the last backward pass. Collective: every rank must give a closure. In
                automatic optimisation, torch's optimizers that need no closure step after it.
            options: for the optimizer's own `step`.

        Raises:
            NonFiniteLossError: with `on_nonfinite="raise"`.
        """
        return self._optimization.step(self.optimizer, closure, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the parameters, or with `set_to_none=False` fill them with zeros."""
        self._optimization.zero_grad(self.optimizer, **({} if set_to_none else {"set_to_none": False}))

    @contextmanager
    def toggled(self) -> Iterator[None]:
        """Make only this optimizer's parameters require gradients in the block, in manual optimisation."""
        self._optimization.toggle(self.optimizer)
        try:
            yield
        finally:
            self._optimization.untoggle()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _plain(optimizer: TrainerOptimizer | Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, TrainerOptimizer) else optimizer


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def is_defined(module: TrainingModule, method: str) -> bool:
    """Return whether a module overrides a method of `TrainingModule`. A value of None counts as undefined."""
    return is_own(module, TrainingModule, method)

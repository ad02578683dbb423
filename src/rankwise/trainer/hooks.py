"""The hooks of modules, callbacks and data modules: table, calls, and Lightning's hooks that are refused."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor

from rankwise.callbacks import Callback, MonitoringCallback
from rankwise.checks import (
    accepts,
    check_arguments,
    check_is_a,
    check_overrides,
    is_of_this_package,
    refuse_methods,
)
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.errors import ConfigurationError
from rankwise.loggers import Logger
from rankwise.trainer.data import DataModule
from rankwise.trainer.data.data_module import TRANSFER_HOOKS, is_own, own_methods
from rankwise.trainer.module import TrainingModule
from rankwise.trainer.module_loading import load_data_module_state

if TYPE_CHECKING:
    from rankwise.trainer import Trainer

_log = logging.getLogger(__name__)
Owner = Literal["module", "callback", "datamodule"]
_BOTH: tuple[Owner, ...] = ("callback", "module")
_ALL: tuple[Owner, ...] = ("datamodule", "callback", "module")
_OF_DATA: tuple[Owner, ...] = ("datamodule", "module")


@final
@dataclass(frozen=True)
class Hook:
    """A hook that the Trainer calls.

    Attributes:
        name: the name of the method.
        arguments: its arguments, in callbacks after `trainer, module`; those with a `?` only where they
            apply, or if the method takes them.
        moment: when it is called, and the default behaviour if there is any.
        owners: who may define it, in the order of the calls. If a data module and a module both define a hook
            with a return value, only the data module's is called.
        is_automatic: whether it is called in automatic optimisation only.
    """

    name: str
    arguments: str
    moment: str
    owners: tuple[Owner, ...] = _BOTH
    is_automatic: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the arguments."""
        return [name.rstrip("?") for name in self.arguments.split(", ") if name]

    @property
    def num_required(self) -> int:
        """How many arguments the hook always gets."""
        return len([name for name in self.arguments.split(", ") if name and not name.endswith("?")])


def _of_module(name: str, arguments: str, moment: str, *, is_automatic: bool = False) -> Hook:
    return Hook(name, arguments, moment, ("module",), is_automatic)


def _of_evaluation(kind: str) -> Iterator[Hook]:
    """Return the hooks of validation, test or prediction, in the order of their calls."""
    batch = "batch, batch_idx, dataloader_idx?"
    if kind == "validation":
        moment = "Before a validation within `fit`. Gradients stay as they are if it is not defined."
        yield _of_module("on_validation_model_zero_grad", "", moment)
    yield _of_module(f"on_{kind}_model_eval", "", "Sets the module's mode: by default `self.eval()`.")
    yield Hook(f"on_{kind}_start", "", "Before the first batch.")
    yield Hook(f"on_{kind}_epoch_start", "", f"After `on_{kind}_start`.")
    yield Hook(f"on_{kind}_batch_start", batch, "Before a batch.")
    yield _of_module(f"{kind}_step", "batch, batch_idx?, dataloader_idx?", "Evaluates a batch.")
    yield Hook(f"on_{kind}_batch_end", f"outputs, {batch}", "After a batch, with what the step returned.")
    yield Hook(f"on_{kind}_epoch_end", "", "After the last batch.")
    yield Hook(f"on_{kind}_end", "", "At the end; the metrics are in `trainer.callback_metrics`.")
    if kind != "predict":
        moment = "Sets the mode for what follows. Each submodule gets its mode back if it is not defined."
        yield _of_module(f"on_{kind}_model_train", "", moment)


HOOKS: Sequence[Hook] = (
    _of_module("configure_callbacks", "", "Before each stage; returns callbacks to add."),
    Hook("prepare_data", "", "In one process of each node, while the others wait.", _OF_DATA),
    Hook("setup", "stage", "When a stage begins; layers may still be added.", _ALL),
    _of_module("configure_model", "", "After `setup`, in every stage; layers may still be added."),
    Hook("on_load_checkpoint", "checkpoint", "After a checkpoint was read; may change it."),
    _of_module("configure_optimizers", "", "Once for each run; returns optimizers and schedulers."),
    Hook(
        "on_fit_start",
        "",
        "When model and optimizers are ready, and the model is wrapped. Layers may be "
        "[added](#layers-that-a-callback-trains).",
    ),
    *(
        Hook(f"{name}_dataloader", "", "Returns the loaders, if the stage was given none.", _OF_DATA)
        for name in ("train", "val", "test", "predict")
    ),
    Hook("on_sanity_check_start", "", "Before the check of `num_sanity_val_steps`.", ("callback",)),
    Hook("on_sanity_check_end", "", "After it; its metrics are thrown away.", ("callback",)),
    Hook("on_train_start", "", "Before the first epoch."),
    Hook(
        "on_train_epoch_start",
        "",
        "Before an epoch's first batch; not again in a run that resumes within the epoch.",
    ),
    Hook(
        "on_before_batch_transfer",
        "batch, dataloader_idx",
        "Before a batch is moved; returns the batch.",
        _OF_DATA,
    ),
    Hook(
        "transfer_batch_to_device",
        "batch, device, dataloader_idx",
        "Returns the batch on the device; by default as `batch_to_device` of the strategy.",
        _OF_DATA,
    ),
    Hook(
        "on_after_batch_transfer",
        "batch, dataloader_idx",
        "After a batch was moved; returns the batch.",
        _OF_DATA,
    ),
    Hook(
        "on_train_batch_start",
        "batch, batch_idx",
        "Before a training batch. If the module's returns -1 on any rank, the epoch ends on all of them, "
        "without this batch and without validation.",
    ),
    _of_module(
        "optimizer_step",
        "epoch, batch_idx, optimizer, optimizer_closure",
        "At the end of an accumulation window; by default `optimizer.step(optimizer_closure)`. The closure "
        "runs `training_step` and backward of the window's last batch.",
        is_automatic=True,
    ),
    _of_module("training_step", "batch, batch_idx?", "Returns the loss of a batch."),
    Hook("on_before_zero_grad", "optimizer", "Before gradients are cleared."),
    _of_module(
        "optimizer_zero_grad", "epoch, batch_idx, optimizer", "Clears the gradients.", is_automatic=True
    ),
    Hook("on_before_backward", "loss", "Before the gradients of a loss are computed."),
    _of_module("backward", "loss", "Computes the gradients; by default `loss.backward()`."),
    Hook("on_after_backward", "", "After the gradients of a loss were computed."),
    Hook("on_before_optimizer_step", "optimizer", "Before a step; gradients are not clipped yet."),
    _of_module(
        "configure_gradient_clipping",
        "optimizer, gradient_clip_val, gradient_clip_algorithm",
        "Clips the gradients; by default `self.clip_gradients` with these arguments.",
        is_automatic=True,
    ),
    _of_module(
        "lr_scheduler_step",
        "scheduler, metric",
        "Steps a learning rate scheduler; `metric` is None for one that monitors nothing.",
        is_automatic=True,
    ),
    Hook(
        "on_train_batch_end",
        "outputs, batch, batch_idx",
        "After a batch. `outputs` is a dictionary: `loss`, detached and divided by "
        "`accumulate_grad_batches`, and what else `training_step` returned.",
    ),
    *_of_evaluation("validation"),
    Hook("on_train_epoch_end", "", "After an epoch and the validation at its end."),
    Hook("on_train_end", "", "After the last epoch."),
    Hook("on_fit_end", "", "At the end of `fit`."),
    *_of_evaluation("test"),
    *_of_evaluation("predict"),
    Hook("on_save_checkpoint", "checkpoint", "Before a checkpoint is written; may change it."),
    Hook(
        "on_exception",
        "exception",
        "When a stage raises on this rank, or is stopped because another rank has failed; in the calling "
        "process when others have failed or were ended, with what it raises. "
        "See [After a failure](#after-a-failure).",
        ("callback", "datamodule"),
    ),
    Hook("teardown", "stage", "When a stage ends, also after an exception.", _ALL),
)
"""All hooks, in the order in which a stage calls them first."""

_BY_NAME = {hook.name: hook for hook in HOOKS}
_NAMES: Mapping[Owner, list[str]] = {
    owner: [hook.name for hook in HOOKS if owner in hook.owners] for owner in _ALL
}
_ELSEWHERE: Mapping[Owner, str] = {
    "callback": "define it in the module; callbacks do not have it.",
    "datamodule": "define it in the module, or in a callback; data modules do not have it.",
}
REFUSED: Mapping[Owner, Mapping[str, str]] = {
    owner: {
        **{
            hook.name: _ELSEWHERE[owner]
            for hook in HOOKS
            if owner in _ELSEWHERE and owner not in hook.owners and hook.name.startswith("on_")
        },
        **MISSING_HOOKS[owner],
    }
    for owner in _ALL
}
"""Hooks that would never be called, with what to write instead, by the kind of object."""


# ------------------------------------------------------------------ checks before a stage


def check_hooks(
    module: TrainingModule,
    callbacks: Iterable[Callback],
    datamodule: DataModule | None = None,
    loggers: Iterable[Logger] = (),
) -> None:
    """Raise ConfigurationError for a hook that would never be called, or not with the arguments it takes.

    The same for an attribute without effect.
    """
    _check_settings(module)
    _check_settings(datamodule)
    refuse_methods(module, REFUSED["module"])
    _check_submodules(module)
    for hook in map(_BY_NAME.__getitem__, own_methods(module, TrainingModule, _NAMES["module"])):
        _check_arguments(module, hook)
        if hook.is_automatic and not module.automatic_optimization:
            name = type(module).__name__
            raise ConfigurationError(
                message=f"{name}.{hook.name}() would never be called: {name} optimises manually.",
                facts=f"{name}.automatic_optimization is False.",
                remedy="leave the method out, and do the same in training_step.",
            )
    for callback in callbacks:
        refuse_methods(callback, REFUSED["callback"])
        for name in own_methods(callback, Callback, _NAMES["callback"]):
            _check_arguments(callback, _BY_NAME[name])
    if datamodule is not None:
        refuse_methods(datamodule, REFUSED["datamodule"])
        for name in own_methods(datamodule, DataModule, _NAMES["datamodule"]):
            _check_arguments(datamodule, _BY_NAME[name])
    for logger in loggers:
        check_is_a("trainer.loggers", logger, Logger)
        check_overrides(logger, MISSING_HOOKS["logger"])


def _check_settings(owner: object) -> None:
    """Raise ConfigurationError for a Lightning attribute that would have no effect."""
    name = "allow_zero_length_dataloader_with_multiple_devices"
    if getattr(owner, name, False):
        raise ConfigurationError(
            message=f"{type(owner).__name__}.{name} has no effect.",
            facts="it is True; a loader that is empty on some ranks is an error on all.",
            remedy='leave it out; Trainer(uneven_inputs="join") lets ranks have fewer batches than others.',
        )


def _check_submodules(module: TrainingModule) -> None:
    for name, _ in module.named_children():
        if name in _BY_NAME:
            raise ConfigurationError(
                message=f"{type(module).__name__} has a submodule with the name of a hook: {name!r}.",
                facts=f"{type(module).__name__}.{name} is the hook, not the submodule.",
                remedy="give the submodule another name.",
            )


def _check_arguments(owner: object, hook: Hook) -> None:
    """Raise ConfigurationError unless a method can be called with the hook's arguments."""
    method = getattr(owner, hook.name)
    if callable(method) and "dataloader_iter" in _parameters_of(method):
        raise ConfigurationError(
            message=f"{type(owner).__name__}.{hook.name}() takes dataloader_iter, which is not supported.",
            facts="the Trainer reads the loaders, so that a run can stop and continue at any batch.",
            remedy=f"def {hook.name}(self, batch, batch_idx).",
        )
    first = ["trainer", "module"] if isinstance(owner, Callback) else []
    check_arguments(owner, hook.name, [*first, *hook.names], len(first) + hook.num_required)


def _parameters_of(method: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(method).parameters
    except ValueError:  # it has no signature
        return ()


def _adapted(method: Callable[..., Any], hook: Hook, num_first: int) -> Callable[..., Any]:
    """Return a method that takes all arguments of a hook, and leaves out a last one that it does not have."""
    if len(hook.names) == hook.num_required or accepts(method, num_first + len(hook.names)):
        return method
    return lambda *args: method(*args[:-1])


def num_step_arguments(module: TrainingModule, step: str, num_loaders: int = 1) -> int:
    """Return how many of `batch, batch_idx, dataloader_idx` a step gets; `batch_idx` may be missing.

    Raises:
        ConfigurationError: with several loaders, if the step does not take `dataloader_idx`.
    """
    method = getattr(module, step)
    counts = (2, 1, 3) if num_loaders == 1 else (3,)
    for count in counts:
        if accepts(method, count):
            return count
    name = f"{type(module).__name__}.{step}"
    raise ConfigurationError(
        message=f"{name}() does not take the number of the loader.",
        facts=f"there are {num_loaders} loaders, and it takes {inspect.signature(method)}.",
        remedy=f"def {step}(self, batch, batch_idx, dataloader_idx=0).",
    )


# ------------------------------------------------------------------ calls


def training_outputs(returned: Any, num_batches: int) -> dict[str, Any]:
    """Return what `on_train_batch_end` gets for what `training_step` has returned, as in Lightning.

    The loss is detached, and divided by the number of batches of an accumulation window.
    """
    outputs = {"loss": returned} if isinstance(returned, Tensor) else {}
    if isinstance(returned, Mapping):
        outputs = dict(returned)
    loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        outputs["loss"] = loss.detach() / num_batches if num_batches > 1 else loss.detach().clone()
    return outputs


def own_method(callback: Callback, name: str) -> Callable[..., Any] | None:
    """Return a callback's method if it is not the empty one of `Callback`."""
    found: Any = getattr(callback, name)
    is_own = callable(found) and getattr(found, "__func__", found) is not getattr(Callback, name)
    return found if is_own else None


@final
@dataclass(frozen=True)
class _Calls:
    """The methods that define one hook: of the data module, callbacks, the module, monitoring callbacks."""

    of_data: Callable[..., Any] | None
    first: tuple[Callable[..., Any], ...]
    own: Callable[..., Any] | None
    last: tuple[Callable[..., Any], ...]


# Forward, backward and data, in which each rank draws random numbers of its own:
_OF_EACH_RANK = frozenset(
    {"backward", *TRANSFER_HOOKS, *(name for name in _BY_NAME if name.endswith("_step"))}
    - {"optimizer_step", "lr_scheduler_step", "on_before_optimizer_step"}
)
# Not called for padding steps:
_OF_BATCHES = ("on_train_batch_start", "on_train_batch_end")


def _extends_ours(method: Callable[..., Any]) -> bool:
    """Return whether a method overrides one of rankwise's own callbacks, which count padding steps."""
    classes = type(getattr(method, "__self__", None)).__mro__
    name = getattr(method, "__name__", "")
    return any(
        name in vars(each) and is_of_this_package(each)
        for each in classes
        if each not in (Callback, TrainingModule)
    )


@final
@dataclass(frozen=True)
class Hooks:
    """Call the hooks of a trainer's data module and callbacks, and of the module of a stage.

    Which of them define a hook is decided at its first call, and again when the list of callbacks changes; a
    hook that nobody defines costs a look-up. In hooks all ranks draw the same random numbers. Hooks of
    training batches are not called for a padding step, except the hooks of rankwise's callbacks.
    """

    trainer: Trainer
    module: TrainingModule
    stage: Any  # a `StageState`, whose file imports this one
    _calls: dict[str, _Calls] = field(default_factory=dict)
    _callbacks: list[Callback] = field(default_factory=list)  # the callbacks that `_calls` was made for

    def call(self, name: str, *args: Any, before_monitoring: Callable[[], None] | None = None) -> object:
        """Call a hook of the data module, the callbacks, the module, and then of the monitoring callbacks.

        `before_monitoring` runs before the monitoring callbacks and publishes the metrics that they read.
        Return the result of the module's hook.
        """
        trainer, module = self.trainer, self.module
        calls = self._calls.get(name) if trainer.callbacks == self._callbacks else None
        if calls is None:
            calls = self._find(name)
        if calls.of_data is not None:
            calls.of_data(*args)
        for method in calls.first:
            method(trainer, module, *args)
        returned: object = None if calls.own is None else calls.own(*args)
        if before_monitoring is not None:
            before_monitoring()
        for method in calls.last:
            method(trainer, module, *args)
        return returned

    def own(self, name: str) -> Callable[..., Any] | None:
        """Return the module's method for a hook if it is the module's own, else None."""
        return self._find(name).own

    def is_defined(self, name: str) -> bool:
        """Return whether the data module, the module or a callback defines a hook."""
        calls = self._find(name)
        return bool(calls.of_data or calls.first or calls.own or calls.last)

    def is_before_metrics(self, name: str) -> bool:
        """Return whether anything defines a hook that runs before the metrics are published; see `call`."""
        calls = self._find(name)
        return bool(calls.of_data or calls.first or calls.own)

    def _find(self, name: str) -> _Calls:
        callbacks = self.trainer.callbacks
        if callbacks != self._callbacks:
            self._callbacks[:] = callbacks
            self._calls.clear()
        found = self._calls.get(name)
        if found is None:
            found = self._calls[name] = self._search(_BY_NAME[name])
        return found

    def _search(self, hook: Hook) -> _Calls:
        name, callbacks = hook.name, self._callbacks if "callback" in hook.owners else []
        profiled = self.trainer.profiler.profiled
        first, last = list[Callable[..., Any]](), list[Callable[..., Any]]()
        for each in callbacks:
            if (method := own_method(each, name)) is not None:
                key = f"[Callback]{each.state_key}"
                call = self._of_user(profiled(f"{key}.{name}", _adapted(method, hook, 2)), method, key, name)
                (last if isinstance(each, MonitoringCallback) else first).append(call)
        has_own = "module" in hook.owners and is_own(self.module, TrainingModule, name)
        own = _adapted(getattr(self.module, name), hook, 0) if has_own else None
        if callable(own):
            key = f"[Module]{type(self.module).__name__}"
            own = self._of_user(profiled(f"{key}.{name}", own), own, key, name)
        datamodule = self.trainer.datamodule if "datamodule" in hook.owners else None
        has_data = datamodule is not None and is_own(datamodule, DataModule, name)
        of_data = getattr(datamodule, name) if has_data else None
        return _Calls(of_data, tuple(first), own if callable(own) else None, tuple(last))

    def _of_user(
        self, call: Callable[..., Any], method: Callable[..., Any], key: str, name: str
    ) -> Callable[..., Any]:
        """Return `call`, the method of a hook, so that several ranks do in it what one process does."""
        is_alone = self.trainer.world_size == 1
        # Rankwise's own hooks of batches draw no random numbers.
        if is_alone or name in _OF_EACH_RANK or ("_batch_" in name and is_of_this_package(method)):
            return call
        stage, label = self.stage, f"{key}.{name}"

        def draw_the_same(*args: Any) -> Any:
            with stage.random.shared(label):
                return call(*args)

        if name not in _OF_BATCHES or _extends_ours(method):
            return draw_the_same

        def call_with_batch(*args: Any) -> Any:
            schedule = stage.schedule
            return None if schedule is None else schedule.call_with_batch(name, draw_the_same, *args)

        return call_with_batch

    def call_saving_hooks(self, checkpoint: dict[str, Any], *, weights_only: bool) -> None:
        """Call `on_save_checkpoint` of all callbacks in their order, then of the module.

        With `weights_only` call the module's alone, as Lightning does.
        """
        with self.stage.random.shared("on_save_checkpoint"):
            for callback in () if weights_only else self.trainer.callbacks:
                callback.on_save_checkpoint(self.trainer, self.module, checkpoint)
            self.module.on_save_checkpoint(checkpoint)

    def call_loading_hooks(self, checkpoint: dict[str, Any], path: str) -> None:
        """Call `on_load_checkpoint` of the module, load the data module's state, then call the callbacks'."""
        self.module.on_load_checkpoint(checkpoint)
        if self.trainer.datamodule is not None:
            load_data_module_state(self.trainer.datamodule, checkpoint, path)
        for callback in self.trainer.callbacks:
            callback.on_load_checkpoint(self.trainer, self.module, checkpoint)

    def call_exception_hooks(self, error: BaseException) -> None:
        """Call `on_exception` of the callbacks, then of the data module; modules do not have it.

        Their exceptions are logged, because the original failure is raised.
        """
        for callback in self.trainer.callbacks:
            with errors_logged(f"{type(callback).__name__}.on_exception"):
                callback.on_exception(self.trainer, self.module, error)
        if (data := self.trainer.datamodule) is not None:
            with errors_logged(f"{type(data).__name__}.on_exception"):
                data.on_exception(error)


@contextmanager
def errors_logged(hook: str) -> Iterator[None]:
    """Log an exception of a hook after a failure; the failure is raised instead."""
    handled = sys.exc_info()[1]
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001  hooks are the user's code
        if error.__context__ is handled:
            error.__suppress_context__ = True  # the failure is shown by itself
        _log.warning("%s raised an error after the failure of the job:", hook, exc_info=error)

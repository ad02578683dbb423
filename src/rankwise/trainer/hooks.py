"""The hooks of modules, callbacks and data modules: table, calls, and Lightning's hooks that are refused."""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor

from rankwise import checks
from rankwise.callbacks import Callback, MonitoringCallback
from rankwise.compatibility.names import CALLBACK_METHODS, MISSING_HOOKS, NOT_IGNORED, SETTINGS
from rankwise.errors import ConfigurationError
from rankwise.loggers import Logger
from rankwise.ranks import warn
from rankwise.trainer.data import DataModule
from rankwise.trainer.data.data_module import TRANSFER_HOOKS, is_own
from rankwise.trainer.module import TrainingModule
from rankwise.trainer.module_loading import load_data_module_state

if TYPE_CHECKING:
    from rankwise.trainer import Trainer

_log = logging.getLogger(__name__)
Owner = Literal["module", "callback", "datamodule"]
_ALL: tuple[Owner, ...] = ("datamodule", "callback", "module")
_OF_DATA: tuple[Owner, ...] = ("datamodule", "module")


@final
@dataclass(frozen=True)
class Hook:
    """A hook that the Trainer calls; docs/hooks.md says when."""

    name: str
    # In callbacks after `trainer, module`; with a `?`, only where they apply, or if the method takes them.
    arguments: str = ""
    # Who may define it, in the order of the calls. If a data module and a module both define a hook with a
    # return value, only the data module's is called.
    owners: tuple[Owner, ...] = ("callback", "module")
    is_automatic: bool = False  # whether it is called in automatic optimisation only

    @property
    def names(self) -> list[str]:
        """The names of the arguments."""
        return [name.rstrip("?") for name in self.arguments.split(", ") if name]

    @property
    def num_required(self) -> int:
        """How many arguments the hook always gets."""
        return len([name for name in self.arguments.split(", ") if name and not name.endswith("?")])


def _of_module(name: str, arguments: str = "", *, is_automatic: bool = False) -> Hook:
    return Hook(name, arguments, ("module",), is_automatic)


def _of_evaluation(kind: str) -> Iterator[Hook]:
    """Return the hooks of validation, test or prediction, in the order of their calls."""
    batch = "batch, batch_idx, dataloader_idx?"
    if kind == "validation":
        yield _of_module("on_validation_model_zero_grad")
    yield _of_module(f"on_{kind}_model_eval")
    yield Hook(f"on_{kind}_start")
    yield Hook(f"on_{kind}_epoch_start")
    yield Hook(f"on_{kind}_batch_start", batch)
    yield _of_module(f"{kind}_step", "batch, batch_idx?, dataloader_idx?")
    yield Hook(f"on_{kind}_batch_end", f"outputs, {batch}")
    yield Hook(f"on_{kind}_epoch_end")
    yield Hook(f"on_{kind}_end")
    if kind != "predict":
        yield _of_module(f"on_{kind}_model_train")


_CLIPPING_ARGUMENTS = "optimizer, gradient_clip_val, gradient_clip_algorithm"
HOOKS: Sequence[Hook] = (
    _of_module("configure_callbacks"),
    Hook("prepare_data", owners=_OF_DATA),
    Hook("setup", "stage", _ALL),
    _of_module("configure_model"),
    Hook("on_load_checkpoint", "checkpoint"),
    _of_module("configure_optimizers"),
    Hook("on_fit_start"),
    *(Hook(f"{name}_dataloader", owners=_OF_DATA) for name in ("train", "val", "test", "predict")),
    *(Hook(f"on_sanity_check_{edge}", owners=("callback",)) for edge in ("start", "end")),
    Hook("on_train_start"),
    Hook("on_train_epoch_start"),
    Hook("on_before_batch_transfer", "batch, dataloader_idx", _OF_DATA),
    Hook("transfer_batch_to_device", "batch, device, dataloader_idx", _OF_DATA),
    Hook("on_after_batch_transfer", "batch, dataloader_idx", _OF_DATA),
    Hook("on_train_batch_start", "batch, batch_idx"),
    _of_module("optimizer_step", "epoch, batch_idx, optimizer, optimizer_closure", is_automatic=True),
    _of_module("training_step", "batch, batch_idx?"),
    Hook("on_before_zero_grad", "optimizer"),
    _of_module("optimizer_zero_grad", "epoch, batch_idx, optimizer", is_automatic=True),
    Hook("on_before_backward", "loss"),
    _of_module("backward", "loss"),
    Hook("on_after_backward"),
    Hook("on_before_optimizer_step", "optimizer"),
    _of_module("configure_gradient_clipping", _CLIPPING_ARGUMENTS, is_automatic=True),
    _of_module("lr_scheduler_step", "scheduler, metric", is_automatic=True),
    Hook("on_train_batch_end", "outputs, batch, batch_idx"),
    *_of_evaluation("validation"),
    Hook("on_train_epoch_end"),
    Hook("on_train_end"),
    Hook("on_fit_end"),
    *_of_evaluation("test"),
    *_of_evaluation("predict"),
    Hook("on_save_checkpoint", "checkpoint"),
    Hook("on_exception", "exception", ("callback", "datamodule")),
    Hook("teardown", "stage", _ALL),
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
    module: TrainingModule, callbacks: list[Callback], datamodule: DataModule | None, loggers: list[Logger]
) -> None:
    """Raise ConfigurationError for a hook that cannot be called as it is, or an attribute without effect."""
    _check_settings(module, "module")
    _check_settings(datamodule, "datamodule")
    _check_submodules(module)
    for hook in _check_methods(module, "module", TrainingModule):
        if hook.is_automatic and not module.automatic_optimization:
            name = type(module).__name__
            raise ConfigurationError(
                message=f"{name}.{hook.name}() would never be called: {name} optimises manually.",
                facts=f"{name}.automatic_optimization is False.",
                remedy="leave the method out, and do the same in training_step.",
            )
    for callback in callbacks:
        _check_methods(callback, "callback", Callback)
        for base in filter(checks.is_of_this_package, type(callback).__mro__):
            checks.refuse_methods(callback, CALLBACK_METHODS.get(base.__name__, {}))
            _check_settings(callback, base.__name__)
    if datamodule is not None:
        _check_methods(datamodule, "datamodule", DataModule)
    for logger in loggers:
        checks.check_is_a("trainer.loggers", logger, Logger)
        checks.check_overrides(logger, MISSING_HOOKS["logger"])


def _check_settings(owner: object, kind: str) -> None:
    """Raise ConfigurationError for a Lightning attribute that would have no effect."""
    for name, remedy in SETTINGS.get(kind, {}).items():
        if (value := getattr(owner, name, False)) is not False:
            raise ConfigurationError(
                message=f"{type(owner).__name__}.{name} has no effect.",
                facts=f"it is {value!r}.",
                remedy=remedy,
            )


def _check_submodules(module: TrainingModule) -> None:
    for name, _ in module.named_children():
        if name in _BY_NAME:
            raise ConfigurationError(
                message=f"{type(module).__name__} has a submodule with the name of a hook: {name!r}.",
                facts=f"{type(module).__name__}.{name} is the hook, not the submodule.",
                remedy="give the submodule another name.",
            )


def _check_methods(owner: object, kind: Owner, base: type) -> list[Hook]:
    """Raise ConfigurationError for methods that cannot be called; return the hooks that `owner` defines."""
    _refuse_uncalled(owner, REFUSED[kind])
    _warn_of_misspelt(owner, kind)
    defined = [_BY_NAME[name] for name in _NAMES[kind] if is_own(owner, base, name)]
    first = ["trainer", "module"] if kind == "callback" else []
    for hook in defined:
        called, method = f"{type(owner).__name__}.{hook.name}", getattr(owner, hook.name)
        if not hook.name.endswith("_dataloader"):  # a stage checks those that it calls
            remedy = "this is the name of a hook: give the attribute another name."
            checks.check_callable(called, method, "a method", remedy)
        if "dataloader_iter" in _parameters_of(method):
            raise ConfigurationError(
                message=f"{called}() takes dataloader_iter, which is not supported.",
                facts="the Trainer reads the loaders, so that a run can stop and continue at any batch.",
                remedy=f"def {hook.name}(self, batch, batch_idx).",
            )
        checks.check_arguments(owner, hook.name, [*first, *hook.names], len(first) + hook.num_required)
    return defined


def _refuse_uncalled(owner: object, refused: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a method that no stage calls; warn where Lightning's classes ignore it."""
    if any(map(checks.is_lightnings_own, type(owner).__mro__)):
        ignored = [name for name in refused if name not in NOT_IGNORED]
        for name in checks.methods_among(ignored, owner):
            warn(f"{type(owner).__name__}.{name}() is not a hook: no stage calls it, as in Lightning.")
        refused = {name: remedy for name, remedy in refused.items() if name in NOT_IGNORED}
    checks.refuse_methods(owner, refused)


def _warn_of_misspelt(owner: object, kind: Owner) -> None:
    """Warn of methods of a user's class with nearly the name of a hook, which only the user's code calls."""
    own = {
        name
        for base in type(owner).__mro__
        for name in (() if checks.is_of_this_package(base) else vars(base))
        if name.startswith(("on_", "configure_")) and inspect.isfunction(vars(base)[name])
    }
    for name in sorted(own.difference(_NAMES[kind])):
        for hook in difflib.get_close_matches(name, _NAMES[kind], n=1, cutoff=0.9):
            warn(f"{type(owner).__name__}.{name}() is not a hook: no stage calls it. Did you mean {hook}()?")


def _parameters_of(method: Any) -> Iterable[str]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):  # it is no function, or has no signature
        return ()


def num_step_arguments(module: TrainingModule, step: str, num_loaders: int = 1) -> int:
    """Return how many of `batch, batch_idx, dataloader_idx` a step gets; all three with several loaders."""
    method = getattr(module, step)
    counts = (2, 1, 3) if num_loaders == 1 else (3,)
    for count in counts:
        if checks.accepts(method, count):
            return count
    name = f"{type(module).__name__}.{step}"
    raise ConfigurationError(
        message=f"{name}() does not take the number of the loader.",
        facts=f"there are {num_loaders} loaders, and it takes {inspect.signature(method)}.",
        remedy=f"def {step}(self, batch, batch_idx, dataloader_idx=0).",
    )


# ------------------------------------------------------------------ calls


def training_outputs(returned: Any, num_batches: int) -> dict[str, Any]:
    """Return what `on_train_batch_end` gets: a dictionary, with a detached loss, divided by `num_batches`."""
    outputs = {"loss": returned} if isinstance(returned, Tensor) else {}
    if isinstance(returned, Mapping):
        outputs = dict(returned)
    loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        outputs["loss"] = loss.detach() / num_batches if num_batches > 1 else loss.detach().clone()
    return outputs


def _own_method(owner: object, kind: Owner, base: type, hook: Hook) -> Callable[..., Any] | None:
    """Return an object's method for a hook if it may define the hook, and it is not the one of `base`."""
    found = getattr(owner, hook.name) if owner is not None and kind in hook.owners else None
    return found if callable(found) and is_own(owner, base, hook.name) else None


@final
@dataclass(frozen=True)
class _Calls:
    """The methods that define one hook: of data module and callbacks, the module, monitoring callbacks."""

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
    classes = {*type(getattr(method, "__self__", None)).__mro__} - {Callback, TrainingModule}
    name = getattr(method, "__name__", "")
    return any(name in vars(each) and checks.is_of_this_package(each) for each in classes)


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
        """Call a hook of data module, callbacks, module and monitoring callbacks; return the module's result.

        `before_monitoring` runs before the monitoring callbacks and publishes the metrics that they read.
        """
        calls = self._calls.get(name) if self.trainer.callbacks == self._callbacks else None
        if calls is None:  # a call less in each step
            calls = self._find(name)
        for call in calls.first:
            call(*args)
        returned: object = None if calls.own is None else calls.own(*args)
        if before_monitoring is not None:
            before_monitoring()
        for call in calls.last:
            call(*args)
        return returned

    def own(self, name: str) -> Callable[..., Any] | None:
        """Return the module's method for a hook if it is the module's own, else None."""
        return self._find(name).own

    def is_defined(self, name: str) -> bool:
        """Return whether the data module, the module or a callback defines a hook."""
        return self.is_before_metrics(name) or bool(self._find(name).last)

    def is_before_metrics(self, name: str) -> bool:
        """Return whether anything defines a hook that runs before the metrics are published; see `call`."""
        calls = self._find(name)
        return bool(calls.first or calls.own)

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
        trainer, module = self.trainer, self.module
        first, last = list[Callable[..., Any]](), list[Callable[..., Any]]()
        if (of_data := _own_method(trainer.datamodule, "datamodule", DataModule, hook)) is not None:
            first.append(of_data)
        for each in self._callbacks:
            if (method := _own_method(each, "callback", Callback, hook)) is not None:
                call = self._of_user(method, hook, f"[Callback]{each.state_key}", 2)
                calls = last if isinstance(each, MonitoringCallback) else first
                calls.append(partial(call, trainer, module))
        own = _own_method(module, "module", TrainingModule, hook)
        if own is not None:
            own = self._of_user(own, hook, f"[Module]{type(module).__name__}", 0)
        return _Calls(tuple(first), own, tuple(last))

    def _of_user(
        self, method: Callable[..., Any], hook: Hook, owner: str, num_first: int
    ) -> Callable[..., Any]:
        """Return a call of a hook's method, in which several ranks do what one process does."""
        name, label = hook.name, f"{owner}.{hook.name}"
        num_given = len(hook.names)
        takes_all = num_given == hook.num_required or checks.accepts(method, num_first + num_given)
        adapted = method if takes_all else lambda *args: method(*args[:-1])
        call = self.trainer.profiler.profiled(label, adapted)
        is_alone = self.trainer.world_size == 1
        # Rankwise's own hooks of batches draw no random numbers.
        if is_alone or name in _OF_EACH_RANK or ("_batch_" in name and checks.is_of_this_package(method)):
            return call
        stage = self.stage

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
        """Call `on_save_checkpoint` of callbacks and module.

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
        """Call `on_exception` of callbacks and data module; log their errors, as the failure is raised."""
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

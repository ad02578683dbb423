"""Modules, data modules and callbacks of Lightning's classes: they get this library's for its Trainer.

Nothing here imports Lightning: its classes are found among the bases of what a user gives.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError, text_of
from rankwise.hyperparameters import record_of_lightning
from rankwise.named_options import USE_OWN_CLASS, is_lightnings_own
from rankwise.trainer.data import DataModule
from rankwise.trainer.module import TrainingModule

if TYPE_CHECKING:
    from rankwise.trainer.properties import TrainerProperties

_NAMES: Mapping[type, str] = {
    TrainingModule: "LightningModule",
    DataModule: "LightningDataModule",
    Callback: "Callback",
}
_OF_CONSTRUCTOR = ("hparams", "hparams_initial", "save_hyperparameters", "load_from_checkpoint")
# What stays Lightning's: it reads what a constructor has set, and uses no trainer.
_KEPT: Mapping[type, tuple[str, ...]] = {
    TrainingModule: (
        *_OF_CONSTRUCTOR,
        "automatic_optimization",
        "example_input_array",
        "strict_loading",
        "freeze",
        "unfreeze",
    ),
    DataModule: (*_OF_CONSTRUCTOR, "from_datasets"),
    Callback: (),
}


def is_of_lightning(value: object, own: type) -> bool:
    """Return whether a value is of the class that Lightning has for `own`, and not of `own` too."""
    return not isinstance(value, own) and _base_of(type(value), own) is not None


@contextmanager
def classes_lent(trainer: TrainerProperties, *given: Any) -> Iterator[None]:
    """In the block, modules and data modules of Lightning's are of this library's classes too.

    What their authors have written stays; the methods of Lightning's base class give way to this library's.
    After the block they are what they were, and have no trainer. Other objects are left alone.
    """
    lent: list[tuple[Any, type, type]] = []
    try:
        for each in given:
            own = TrainingModule if isinstance(each, nn.Module) else DataModule
            if is_of_lightning(each, own):
                parts = each.modules() if isinstance(each, nn.Module) else (each,)
                for part in [part for part in parts if is_of_lightning(part, own)]:
                    before = type(part)
                    _set_class(part, own)
                    lent.append((part, before, type(part)))
                each.trainer = trainer
        yield
    finally:
        for part, before, during in lent:
            part._trainer = None
            if type(part) is during:  # a parametrization gives a module another class
                object.__setattr__(part, "__class__", before)


def take_callbacks(given: Any) -> Any:
    """Give callbacks of Lightning's class the class of this library's, too; return what was given.

    Raises:
        ConfigurationError: for the callbacks that come with Lightning.
    """
    for each in given if isinstance(given, Sequence) else (given,):
        if is_of_lightning(each, Callback):
            for kind in _written_by_user(type(each), Callback, with_lightnings=True):
                if is_lightnings_own(kind):
                    raise ConfigurationError(
                        message=f"callbacks holds Lightning's own {kind.__name__}, which needs its Trainer.",
                        facts=f"it is of {kind.__module__}.",
                        remedy=USE_OWN_CLASS,
                    )
            _set_class(each, Callback)
    return given


def _base_of(kind: type, own: type) -> type | None:
    """Return Lightning's class among the bases of `kind` that `own` stands for; None without one."""
    found = (base for base in kind.__mro__ if base.__name__ == _NAMES[own] and is_lightnings_own(base))
    return next(found, None)


def _set_class(value: object, own: type) -> None:
    kind: Any = type(value)
    try:
        object.__setattr__(value, "__class__", _joined(kind, own))
    except TypeError as error:
        raise ConfigurationError(
            message=f"{kind.__name__} cannot be used with rankwise's Trainer: {text_of(error)}",
            facts=f"it derives from Lightning's {_NAMES[own]}.",
            remedy=f"derive it from rankwise's {_NAMES[own]}: import rankwise.lightning as pl.",
        ) from error


@functools.cache
def _joined(kind: type, own: type) -> Any:
    """Return a class with the methods of `kind`, and those of `own` in place of Lightning's."""
    base: Any = _base_of(kind, own)
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_class_in_lightning": kind,
    }
    bridge = _bridge(base, own)
    return types.new_class(kind.__name__, (bridge,) if kind is base else (kind, bridge), {}, _filled(body))


@functools.cache
def _bridge(base: type, own: type) -> Any:
    """Return a class in which `own` comes before Lightning's class, but for what stays Lightning's."""
    body: dict[str, Any] = {name: inspect.getattr_static(base, name) for name in _KEPT[own]}
    body["__reduce_ex__"] = _reduce_ex
    if own is not Callback:
        body["_hyperparameter_record"] = property(record_of_lightning)
    if own is TrainingModule:
        # Hooks of `to_onnx`; Lightning's asks its own Trainer whose they are.
        body["_call_batch_hook"] = lambda module, name, *args: getattr(module, name)(*args)
        body["configure_sharded_model"] = None  # Lightning's is empty; one that a user has defined is refused
        body["_weight"] = None
    return types.new_class(own.__name__, (own, base), {}, _filled(body))


def _filled(body: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda namespace: namespace.update(body)


def _reduce_ex(value: Any, protocol: Any) -> tuple[Any, ...]:
    """Return what pickle needs: Lightning's class, which can be imported, and ours, given again after it."""
    kind = type(value)
    own = next(own for own in _NAMES if isinstance(value, own))
    parts: Any = object.__reduce_ex__(value, protocol)
    make, arguments, *state = parts
    given = tuple(kind._class_in_lightning if each is kind else each for each in arguments)
    return _made_again, (own, make, given), *state


def _made_again(own: type, make: Callable[..., Any], arguments: Iterable[Any]) -> Any:
    value = make(*arguments)
    _set_class(value, own)
    return value


# ------------------------------------------------------------------ checks before a stage


def check_uses(trainer: TrainerProperties, *given: object) -> None:
    """Raise ConfigurationError where an object of Lightning's uses what this Trainer does not have.

    Its code is read, not run: each `trainer.name`, and `trainer.strategy.name`, has to exist, unless the
    class sets it, or asks for it with `hasattr`.
    """
    for each in given:
        kind = getattr(type(each), "_class_in_lightning", None)
        own = next((own for own in _NAMES if isinstance(each, own)), None)
        if kind is None or own is None:
            continue
        uses = [
            (f"{owner.__name__}.{name}", *_uses_of_trainer(code))
            for owner in _written_by_user(kind, own)
            for name, code in _codes(owner)
        ]
        known = set[str]().union(*(names for _, _, names in uses))
        for where, reads, _ in uses:
            for path in sorted(reads):
                _check_path(trainer, path, known, where)


def _written_by_user(kind: type, own: type, *, with_lightnings: bool = False) -> Iterator[type]:
    """Yield the classes that come before Lightning's base class; those of Lightning's too, if asked."""
    for base in kind.__mro__:
        if base is _base_of(kind, own):
            return
        if with_lightnings or not is_lightnings_own(base):
            yield base


def _codes(kind: type) -> Iterator[tuple[str, types.CodeType]]:
    """Yield the code of a class's own functions, with their names."""
    for name, value in vars(kind).items():
        inner = (getattr(value, part, None) for part in ("fget", "fset", "func", "__func__"))
        for function in (value, *inner):
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if isinstance(code, types.CodeType):
                yield name, code


def _uses_of_trainer(code: types.CodeType) -> tuple[set[tuple[str, ...]], set[str]]:
    """Return the attributes of the trainer that code reads, as paths, and the names of those it may lack.

    The trainer is `self.trainer`, `pl_module.trainer`, or an argument of that name.
    """
    reads, known = set[tuple[str, ...]](), set[str]()
    arguments = (*code.co_varnames[: code.co_argcount], *code.co_freevars)
    path: list[str] | None = None
    owner: object = None
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if path is not None and kind in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(value)
            continue
        if path:
            reads.add(tuple(path))
        elif path is not None and kind in ("STORE_ATTR", "LOAD_CONST") and isinstance(value, str):
            known.add(value)  # trainer.name = ...; hasattr(trainer, "name")
        loaded = value[-1] if isinstance(value, tuple) and value else value  # two names at once
        is_argument = kind.startswith(("LOAD_FAST", "LOAD_DEREF")) and "trainer" in arguments
        is_attribute = kind == "LOAD_ATTR" and owner in ("self", "pl_module")
        path = [] if loaded == "trainer" and (is_argument or is_attribute) else None
        owner = loaded
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_reads, inner_known = _uses_of_trainer(inner)
            reads, known = reads | inner_reads, known | inner_known
    return reads, known


def _check_path(trainer: TrainerProperties, path: tuple[str, ...], known: set[str], where: str) -> None:
    owners: list[object] = [trainer, trainer.strategy] if path[0] == "strategy" else [trainer]
    for owner, name in zip(owners, path, strict=False):
        found = inspect.getattr_static(owner, name, None)
        is_unreadable = isinstance(found, property) and found.fget is None
        is_there = found is not None or name in dir(owner)
        if name not in known and (is_unreadable or not is_there):
            used = ".".join(("trainer", *path[: owners.index(owner) + 1]))
            raise ConfigurationError(
                message=f"{where}() uses {used}, which rankwise's Trainer does not have.",
                facts="the class derives from Lightning's; its code is read before anything starts.",
                remedy="docs/migrating.md says what there is; or keep Lightning's Trainer, with "
                'strategy="rankwise_ddp".',
            )

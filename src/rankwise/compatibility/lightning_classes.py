"""Make Lightning's modules, data modules and callbacks usable in rankwise's Trainer.

Nothing here imports Lightning: its classes are found among the bases of what a user gives.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from rankwise.checks import USE_OWN_CLASS, is_lightnings_own, lightning_base
from rankwise.errors import ConfigurationError, text_of
from rankwise.hyperparameters import record_of_lightning

_OF_CONSTRUCTOR = ("hparams", "hparams_initial", "save_hyperparameters", "load_from_checkpoint")
# What stays Lightning's: it reads what a constructor has set, and uses no trainer.
_KEPT: Mapping[str, tuple[str, ...]] = {
    "LightningModule": (
        *_OF_CONSTRUCTOR,
        "automatic_optimization",
        "example_input_array",
        "strict_loading",
        "freeze",
        "unfreeze",
    ),
    "LightningDataModule": (*_OF_CONSTRUCTOR, "from_datasets"),
    "Callback": (),
}


@contextmanager
def classes_lent(trainer: object, given: Iterable[Any], classes: Mapping[str, type]) -> Iterator[None]:
    """Temporarily add rankwise's base class to modules and data modules that derive from Lightning's.

    Methods of the user stay; rankwise's methods override the methods of Lightning's base class. After the
    block the objects have their previous class, and no trainer. Other objects do not change. `classes` are
    rankwise's, by the name of the class in Lightning.
    """
    lent: list[tuple[Any, type, type]] = []
    try:
        for each in given:
            for name, own in classes.items():
                if _lacks_class(each, name, own):
                    parts = each.modules() if isinstance(each, nn.Module) else (each,)
                    for part in [part for part in parts if _lacks_class(part, name, own)]:
                        before = type(part)
                        _set_class(part, name, own)
                        lent.append((part, before, type(part)))
                    each.trainer = trainer
        yield
    finally:
        for part, before, during in lent:
            part._trainer = None
            if type(part) is during:  # a parametrization gives a module another class
                object.__setattr__(part, "__class__", before)


def give_class_to_callback(callback: object, own: type) -> None:
    """Add rankwise's base class to a user's callback for Lightning; refuse Lightning's own callbacks."""
    if not _lacks_class(callback, "Callback", own):
        return
    kind = type(callback)
    for each in kind.__mro__[: kind.__mro__.index(lightning_base(kind, "Callback"))]:
        if is_lightnings_own(each):
            raise ConfigurationError(
                message=f"callbacks holds Lightning's own {each.__name__}, which needs its Trainer.",
                facts=f"it is of {each.__module__}.",
                remedy=USE_OWN_CLASS,
            )
    _set_class(callback, "Callback", own)


def _lacks_class(value: object, name: str, own: type) -> bool:
    return not isinstance(value, own) and lightning_base(type(value), name) is not None


def _set_class(value: object, name: str, own: type) -> None:
    kind: Any = type(value)
    try:
        object.__setattr__(value, "__class__", _joined(kind, name, own))
    except TypeError as error:
        raise ConfigurationError(
            message=f"{kind.__name__} cannot be used with rankwise's Trainer: {text_of(error)}",
            facts=f"it derives from Lightning's {name}.",
            remedy=f"derive it from rankwise's {name}: import rankwise.lightning as pl.",
        ) from error


@functools.cache
def _joined(kind: type, name: str, own: type) -> Any:
    """Return a class with the methods of `kind`, and with `own`'s methods in place of Lightning's."""
    base: Any = lightning_base(kind, name)
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_class_in_lightning": (kind, name, own),
    }
    bridge = _bridge(base, name, own)
    return _new_class(kind.__name__, (bridge,) if kind is base else (kind, bridge), body)


@functools.cache
def _bridge(base: type, name: str, own: type) -> Any:
    """Return a class in which `own` precedes Lightning's class, except for the names in `_KEPT`."""
    body: dict[str, Any] = {kept: inspect.getattr_static(base, kept) for kept in _KEPT[name]}
    body["__reduce_ex__"] = _reduce_ex
    if "hparams" in body:
        body["_hyperparameters"] = property(record_of_lightning)
    if name == "LightningModule":
        # Used by `to_onnx`; Lightning's version asks its own Trainer.
        body["_call_batch_hook"] = lambda module, hook, *args: getattr(module, hook)(*args)
        body["configure_sharded_model"] = None  # Lightning's is empty; one that a user has defined is refused
        body["_weight"] = None
    return _new_class(own.__name__, (own, base), body)


def _new_class(name: str, bases: tuple[type, ...], body: Mapping[str, Any]) -> type:
    # Unlike type(), it calls the metaclass's __prepare__, which a user's metaclass may need.
    return types.new_class(name, bases, exec_body=lambda namespace: namespace.update(body))


def _reduce_ex(value: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle the object with Lightning's class, which can be imported; loading adds rankwise's again."""
    kind, name, own = type(value)._class_in_lightning
    parts: Any = object.__reduce_ex__(value, protocol)
    make, arguments, *state = parts
    given = tuple(kind if each is type(value) else each for each in arguments)
    return _made_again, (name, own, make, given), *state


def _made_again(name: str, own: type, make: Callable[..., Any], arguments: Iterable[Any]) -> Any:
    value = make(*arguments)
    _set_class(value, name, own)
    return value

"""`HyperparametersMixin`: the hyperparameters of a module, collected from its constructor's arguments."""

from __future__ import annotations

import copy
import inspect
import os
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor

from rankwise.checks import check_value
from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError
from rankwise.nested import is_numpy_scalar, once_each, walked

MODULE_KEYS = ("hyper_parameters", "hparams_name")
"""Lightning's keys of a module's hyperparameters in a checkpoint, and of the name of their container."""
DATA_MODULE_KEYS = ("datamodule_hyper_parameters", "datamodule_hparams_name")
"""The same keys for a data module."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes too: `hparams.lr` is `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} among {sorted(map(str, self))}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)  # raises as reading it does
        del self[name]


@final
@dataclass
class _Record:
    """The hyperparameters of one object."""

    values: AttributeDict = field(default_factory=AttributeDict)
    initial: AttributeDict = field(default_factory=AttributeDict)  # a copy, made when they were saved
    collected: set[str] = field(default_factory=set)  # names of those that were saved without being named
    container: str | None = None  # the constructor's argument that has them all, such as a namespace
    is_logged: bool = True


class HyperparametersMixin:
    """Adds `save_hyperparameters` and `hparams` to a class."""

    _hyperparameters: _Record | None = None  # until the first are saved

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters, which may be changed; items are attributes too."""
        return self._hyperparameter_record.values

    @hparams.setter
    def hparams(self, values: Mapping[str, Any] | Namespace) -> None:
        record = self._hyperparameter_record
        record.values = AttributeDict(_items("hparams", values))
        record.initial = _snapshot(record.values)
        record.collected.clear()

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as they were saved, without later changes of `hparams`."""
        return _snapshot(self._hyperparameter_record.initial)

    @property
    def logged_hparams(self) -> dict[str, Any]:
        """The hyperparameters that loggers get: none after `save_hyperparameters(logger=False)`."""
        record = self._hyperparameter_record
        return dict(record.values) if record.is_logged else {}

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save arguments of the constructor in `hparams`; call it there.

        Several calls add to each other, so a subclass may call it as well as its base class. The arguments of
        all running constructors of this object count, including `**kwargs` but not `*args`, with their
        current values. Hyperparameters are saved in checkpoints, from which `load_from_checkpoint` builds the
        object again.

        Args:
            args: names of arguments; or one mapping or `argparse.Namespace`, whose items are saved. Without
                any, all arguments are saved; those that a checkpoint cannot hold, such as modules and
                functions, are then in `hparams` but not in checkpoints, and `fit` warns of that.
            ignore: names of arguments that are not saved.
            frame: a frame within the constructor, for a call from elsewhere.
            logger: whether loggers get the hyperparameters when `fit` starts.

        Raises:
            ConfigurationError: when no constructor of this object is running, or its arguments do not have
                these names.
            InvalidTypeError: for anything else in `args`.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        current = inspect.currentframe()
        found = _constructor_arguments(self, frame or (current and current.f_back))
        containers = [arg for arg in args if not isinstance(arg, str)]
        expected = "names of arguments, or one mapping or Namespace"
        is_one_kind = not containers or len(args) == 1
        check_value("save_hyperparameters()", args, is_one_kind, expected, error=InvalidTypeError)
        values = _items("save_hyperparameters()", containers[0]) if containers else _chosen(self, found, args)
        record = self._hyperparameter_record
        record.values.update(values)
        for name in ignored:
            record.values.pop(name, None)
        record.collected = record.collected - values.keys() if args else record.collected | values.keys()
        owner = [name for name, value in (found or {}).items() if containers and value is containers[0]]
        record.container = owner[0] if owner else None
        record.initial = _snapshot(record.values)
        record.is_logged = logger

    @property
    def _hyperparameter_record(self) -> _Record:
        if self._hyperparameters is None:
            self._hyperparameters = _Record()
        return self._hyperparameters


def _constructor_arguments(owner: object, frame: FrameType | None) -> dict[str, Any] | None:
    """Return the arguments of the running constructors of `owner`, the subclass's last; None if none runs."""
    constructors = [vars(kind)["__init__"] for kind in type(owner).__mro__ if "__init__" in vars(kind)]
    codes = {getattr(inspect.unwrap(each), "__code__", None) for each in constructors}
    found: dict[str, Any] | None = None
    while frame is not None:
        if frame.f_code in codes:
            names, _, keywords, values = inspect.getargvalues(frame)
            if names and values.get(names[0]) is owner:
                own = {name: values[name] for name in names[1:] if name in values}
                found = {**(found or {}), **own, **values.get(keywords or "", {})}
        frame = frame.f_back
    return found


def _chosen(owner: object, found: dict[str, Any] | None, names: Sequence[str]) -> dict[str, Any]:
    if found is None:
        kind = type(owner).__name__
        raise ConfigurationError(
            message=f"save_hyperparameters() was called where no constructor of {kind} is running.",
            remedy=f"call it in {kind}.__init__, or pass a mapping: self.save_hyperparameters({{...}}).",
        )
    for name in names:
        if name not in found:
            raise UnknownNameError(kind="argument in save_hyperparameters()", name=name, known=tuple(found))
    return {name: found[name] for name in names} if names else found


def _items(argument: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Namespace):
        return dict(vars(given))
    if isinstance(given, Mapping):
        return dict(given)
    raise InvalidTypeError(argument=argument, value=given, expected="a mapping or an argparse.Namespace")


def _snapshot(values: Mapping[str, Any]) -> AttributeDict:
    """Copy what consists of plain types; other objects, such as modules, stay the same."""
    return AttributeDict(
        {name: copy.deepcopy(value) if _is_storable(value) else value for name, value in values.items()}
    )


def record_of_lightning(owner: Any) -> _Record:
    """Return the record of what Lightning's own `save_hyperparameters` has saved in an object."""
    values = AttributeDict(owner.hparams)
    container = getattr(owner, "_hparams_name", None)
    return _Record(values, values, set(values), container, owner._log_hyperparams)


def checkpointed_parts(owner: HyperparametersMixin, keys: tuple[str, str] = MODULE_KEYS) -> dict[str, Any]:
    """Return the parts of a checkpoint with the hyperparameters, by Lightning's `keys`; none for none.

    Namespaces and other mappings become dictionaries, other lists become lists.
    """
    record, left_out = owner._hyperparameter_record, left_out_of_checkpoints(owner)
    values = {name: _stored(value) for name, value in record.values.items() if name not in left_out}
    if not values:
        return {}
    return dict(zip(keys, (values, record.container or "kwargs"), strict=True))


def left_out_of_checkpoints(owner: HyperparametersMixin) -> dict[str, Any]:
    """Return the hyperparameters that checkpoints cannot hold, and that nobody has named."""
    record = owner._hyperparameter_record
    unnamed = {name: value for name, value in record.values.items() if name in record.collected}
    return {name: value for name, value in unnamed.items() if not _is_storable(value)}


def _is_storable(value: Any) -> bool:
    """Return whether a value, or a plain form of it, loads with `weights_only=True`."""
    return all(_parts(item) is not None or _is_plain(item) for item in walked(value, _parts))


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (*_SCALARS, Tensor, torch.nn.Parameter)
        or is_numpy_scalar(value)
        or isinstance(value, os.PathLike)
        or type(value) in torch.serialization.get_safe_globals()
    )


def _parts(value: Any) -> list[Any] | None:
    """Return the items of a container; None for other values."""
    if isinstance(value, Namespace):
        return list(vars(value).values())
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    is_container = type(value) in (tuple, set, frozenset) or isinstance(value, MutableSequence)
    return list(value) if is_container else None


def _stored(value: Any) -> Any:
    """Return a value with its namespaces as dictionaries, and its containers as Python's own."""
    stored = once_each(lambda item: _converted(item, stored))
    return stored(value)


def _converted(value: Any, stored: Callable[[Any], Any]) -> Any:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        kind: Any = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kind({key: stored(item) for key, item in value.items()})
    if type(value) is tuple:
        return tuple(map(stored, value))
    return list(map(stored, value)) if isinstance(value, MutableSequence) else value

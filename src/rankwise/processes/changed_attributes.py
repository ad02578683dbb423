"""`ObjectState`: the attributes of an object that a stage has changed, for the calling process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from rankwise.nested import walked
from rankwise.processes.memory_file import Parts, Unreadable, fingerprint, pickling_error, sent_by_name

_OF_TORCH = frozenset(vars(nn.Module())) | {"_trainer", "_compiled_call_impl"}
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# The calling process has the data already, and its `configure_optimizers` makes optimizers; a handle belongs
# to the hooks of one process.
_STAY_THERE = (Dataset, DataLoader, Sampler, Optimizer, LRScheduler, RemovableHandle)


@final
class AttributesBefore:
    """The plain attributes of an object before a stage, to find the ones that the stage changes.

    `named` are the objects that are sent by name.
    """

    def __init__(self, owner: object, named: Mapping[str, object]) -> None:
        self.values = dict(vars(owner))
        plain = {
            name: value
            for name, value in self.values.items()
            if name not in _OF_TORCH and not isinstance(value, (*_CONSTANTS, *_STAY_THERE))
        }
        with sent_by_name(named):
            self._known = {name: _known(value) for name, value in plain.items()}

    def has_changed(self, name: str, value: Any) -> bool:
        """Return whether an attribute, or something in it, has changed since then."""
        if value is not self.values.get(name, _OF_TORCH):
            return True
        return name in self._known and self._known[name][0] != _known(value)[0]

    def had(self, name: str, item: Any) -> bool:
        """Return whether an attribute that cannot be sent as a whole had an item at that time."""
        return name in self._known and any(each is item for each in self._known[name][1])


def _known(value: Any) -> tuple[object, list[object]]:
    """Return a token that changes when a value does, and the items in its containers.

    The token is a digest, or without one the ids of the items.
    """
    digest = None if _holds_data(value) else fingerprint(value)
    held = [] if digest else list(walked(value, _items))
    return digest or list(map(id, held)), held


@final
class ObjectState:
    """The attributes of an object that a stage has changed; `before` are the attributes at its start.

    Data, optimizers, schedulers, handles of hooks, and what `__getstate__` leaves out stay in the worker.
    If some items of a dictionary cannot be sent, the others are.
    """

    def __init__(self, owner: object, before: AttributesBefore) -> None:
        state = _state_of(owner)
        self._changed = Parts()
        self._removed = [name for name in before.values if name not in vars(owner)]
        for name, value in vars(owner).items():
            is_kept = name in _OF_TORCH or state.get(name) is not value
            if not is_kept and before.has_changed(name, value):
                sent = _sendable(value, partial(before.had, name))
                if sent is not _KEPT:
                    self._changed[name] = sent

    def give_to(self, owner: object, *, removes: bool = True) -> None:
        """Give an object these attributes; with `removes`, delete the ones that the stage has deleted.

        Raises:
            Unreadable: at the end, for attributes that could not be packed or read, which stay as they are.
        """
        attributes = vars(owner)
        for name in self._removed if removes else ():
            attributes.pop(name, None)
        for name, value in self._changed.items():
            if not isinstance(value, Unreadable):
                attributes[name] = updated(attributes.get(name), value)
        if lost := [text for name, value in self._changed.items() for text in _unreadable(name, value)]:
            raise Unreadable("; ".join(lost))


def _unreadable(name: str, value: Any) -> Iterator[str]:
    """Yield the name and the reason of each part of an attribute that could not be packed or read."""
    if isinstance(value, Unreadable):
        yield f"{name}: {value.reason}"
    elif isinstance(value, _SomeItems):
        for key, item in value.items.items():
            yield from _unreadable(f"{name}[{key!r}]", item)


_KEPT: Any = object()


def _sendable(value: Any, is_old: Callable[[Any], bool]) -> Any:
    """Return the part of a value to send, `_KEPT`, or an `Unreadable` for a new value that cannot be sent."""
    if isinstance(value, _STAY_THERE):
        return _KEPT
    has_data = _holds_data(value)
    error = None if has_data else pickling_error(value)
    if not has_data and error is None:
        return value
    parts = _parts(value)
    if parts is None:
        return _KEPT if error is None or is_old(value) else Unreadable.because_of(error)
    items = {key: _sendable(item, is_old) for key, item in parts.items()}
    return _SomeItems([*parts], Parts({key: item for key, item in items.items() if item is not _KEPT}))


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return a dictionary with names as keys, or the fields of a dataclass; None for anything else."""
    if isinstance(value, dict):
        return value if all(isinstance(key, (str, int)) for key in value) else None
    is_data = is_dataclass(value) and not isinstance(value, type)
    return getattr(value, "__dict__", None) if is_data else None


@final
class _SomeItems:
    """The keys of a dictionary, or the fields of a dataclass, and the items that could be sent."""

    def __init__(self, keys: list[Any], items: Parts) -> None:
        self._keys = keys
        self.items = items

    def given_to(self, current: Any) -> Any:
        """Return `current`, or a new dictionary, with these items; items that were not sent stay."""
        parts = _parts(current)
        if parts is None:
            parts = current = {}
        sent = {key: item for key, item in self.items.items() if not isinstance(item, Unreadable)}
        new = {key: updated(parts.get(key), item) for key, item in sent.items()}
        merged = {key: new.get(key, parts.get(key)) for key in self._keys if key in new or key in parts}
        parts.clear()
        parts.update(merged)
        return current


def _state_of(owner: Any) -> dict[str, Any]:
    """Return the attributes with which an object is pickled; none if that fails."""
    if isinstance(owner, nn.Module) and parametrize.is_parametrized(owner):  # its method only raises
        return vars(owner)
    try:
        state = getattr(type(owner), "__getstate__", vars)(owner)  # Python 3.10's object has none
    except Exception:  # noqa: BLE001  pickling runs the user's code
        return {}
    return state if isinstance(state, dict) else {}


def _holds_data(value: Any) -> bool:
    """Return whether a value, or an item of it, stays in the worker."""
    return any(isinstance(item, _STAY_THERE) for item in walked(value, _items))


def _items(value: Any) -> Iterable[Any] | None:
    parts = value if isinstance(value, (list, tuple, set, dict)) else _parts(value)
    return parts.values() if isinstance(parts, dict) else parts


def updated(current: Any, value: Any) -> Any:
    """Return `current` with the contents of `value`, if it can be changed in place; otherwise `value`."""
    if isinstance(value, _SomeItems):
        return value.given_to(current)
    if type(current) is not type(value):
        return value
    if type(value) is list:
        current[:] = value
    elif type(value) in (dict, set):
        current.clear()
        current.update(value)
    elif type(value) is Tensor:
        return with_contents(current, value)
    else:
        return value
    return current


def with_contents(current: Tensor, value: Tensor) -> Tensor:
    """Return `current` with the contents of `value`, if it can be changed in place; otherwise `value`."""
    if (current.shape, current.dtype) != (value.shape, value.dtype):
        return value
    try:
        with torch.no_grad():
            return current.copy_(value)
    except RuntimeError:  # an expanded tensor, or one of inference mode
        return value

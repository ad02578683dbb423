"""The attributes of an object that a stage has changed: what of them goes back to the calling process."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
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
from rankwise.processes.shared_memory import (
    Isolated,
    Unreadable,
    are_everywhere,
    fingerprint,
    modules_needed,
    sent_by_name,
)

_OF_TORCH = frozenset(vars(nn.Module())) | {"_trainer", "_compiled_call_impl"}
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# The calling process has given the data, and its `configure_optimizers` makes optimizers; a handle belongs to
# the hooks of one process.
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
        return name in self._known and self._known[name] != _known(value)

    def had(self, name: str, item: Any) -> bool:
        """Return whether an attribute that cannot be sent as a whole had an item at that time."""
        known = self._known.get(name)
        return isinstance(known, _Leaves) and known.has(item)


def _known(value: Any) -> object:
    """Return what changes with a value: a digest, or all that is in its containers."""
    if _holds(value, _STAY_THERE):
        return _Leaves(value)
    return fingerprint(value) or _Leaves(value)


@final
class _Leaves:
    """The objects in nested containers; equal to another with the same objects."""

    def __init__(self, value: Any) -> None:
        self._leaves = list(walked(value, _items))

    def has(self, item: Any) -> bool:
        return any(leaf is item for leaf in self._leaves)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Leaves)
            and len(self._leaves) == len(other._leaves)
            and all(map(operator.is_, self._leaves, other._leaves))
        )

    __hash__ = None  # type: ignore[assignment]  # not needed


def changed_attributes(owner: object, before: AttributesBefore) -> tuple[dict[str, Any], list[str]]:
    """Return an object's plain attributes that have changed, and the names of those that cannot be sent.

    Data, optimizers, schedulers, handles of hooks, and what `__getstate__` leaves out are in neither. If some
    items of a dictionary cannot be sent, the others are.
    """
    state = _state_of(owner)
    changed: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in vars(owner).items():
        is_kept = name in _OF_TORCH or state.get(name) is not value
        if is_kept or not before.has_changed(name, value):
            continue
        sent, missing = _sendable(value, partial(before.had, name))
        lost += [name + place for place in missing]
        if sent is not _KEPT:
            changed[name] = sent
    return changed, lost


_KEPT: Any = object()


def _sendable(value: Any, is_old: Callable[[Any], bool]) -> tuple[Any, list[str]]:
    """Return what is sent of a value, or `_KEPT`, and the places of new items that cannot be sent."""
    if isinstance(value, _STAY_THERE):
        return _KEPT, []
    needed = None if _holds(value, _STAY_THERE) else modules_needed(value)
    if needed is not None:
        return (value if are_everywhere(needed) else Isolated(value)), []
    parts = _parts(value)
    if parts is None:
        is_lost = not (is_old(value) or _holds(value, _STAY_THERE))
        return _KEPT, [""] if is_lost else []
    sent, lost = {}, []
    for key, item in parts.items():
        sent[key], missing = _sendable(item, is_old)
        lost += [f"[{key!r}]{place}" for place in missing]
    items = {key: item for key, item in sent.items() if item is not _KEPT}
    return _SomeItems([*parts], items), lost


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return a dictionary with names as keys, or the fields of a dataclass; None for anything else."""
    if isinstance(value, dict):
        return value if all(isinstance(key, (str, int)) for key in value) else None
    is_data = is_dataclass(value) and not isinstance(value, type)
    return getattr(value, "__dict__", None) if is_data else None


@final
class _SomeItems:
    """The keys of a dictionary, or the fields of a dataclass, and the items that could be sent."""

    def __init__(self, keys: list[Any], items: dict[Any, Any]) -> None:
        self._keys = keys
        self._items = items

    def given_to(self, current: Any) -> Any:
        """Return `current`, or a new dictionary, with these items; items that were not sent stay."""
        parts = _parts(current)
        if parts is None:
            parts = current = {}
        new = {key: updated(parts.get(key), item) for key, item in self._items.items()}
        new = {key: item for key, item in new.items() if not isinstance(item, Unreadable)}
        merged = {key: new.get(key, parts.get(key)) for key in self._keys if key in new or key in parts}
        parts.clear()
        parts.update(merged)
        return current


def _state_of(owner: Any) -> dict[str, Any]:
    """Return the attributes with which an object is pickled; none if that fails."""
    if isinstance(owner, nn.Module) and parametrize.is_parametrized(owner):  # whose method only raises
        return vars(owner)
    try:
        state = getattr(type(owner), "__getstate__", vars)(owner)  # Python 3.10's object has none
    except Exception:  # noqa: BLE001  pickling runs anybody's code
        return {}
    return state if isinstance(state, dict) else {}


def _holds(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value, or an item of it, is of some kind."""
    return any(isinstance(item, kinds) for item in walked(value, _items))


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

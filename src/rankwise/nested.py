"""Functions of nested containers: `map_nested` applies a function to the tensors or other values in them."""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserString, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import repeat
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")
_NOT_CONTAINERS = (str, bytes, bytearray, memoryview, range, array.array, UserString, torch.Size)
_SCALARS = (int, float, complex, str, bytes, type(None))
Kinds = type | tuple[type, ...]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `function` applied to each tensor in it; see `map_nested`."""
    return map_nested(value, Tensor, function)


def to_device(value: T, device: torch.device | str, *, non_blocking: bool = False) -> T:
    """Return `value` with every tensor on a device, except the sizes of packed sequences, which stay."""
    moved: T = map_nested(
        value, (Tensor, PackedSequence), methodcaller("to", device, non_blocking=non_blocking)
    )
    return moved


def map_nested(
    value: Any,
    kinds: Kinds,
    function: Callable[[Any], Any],
    other: Callable[[Any], Any] | None = None,
    *,
    each_place: bool = False,
) -> Any:
    """Return `value` with `function` applied to each value of `kinds` in it.

    Containers and dataclasses, nested in any way, are copied and keep their types: mappings, sequences, named
    tuples, frozen dataclasses. The cached properties of dataclasses are computed again. `other` is applied to
    all other values; without `other` they stay the same objects. A container that occurs at several places is
    copied once; with `each_place`, once for each place.
    """
    if isinstance(value, kinds):  # as most batches are: a tensor, or a list of some
        return function(value)
    kind: Any = type(value)
    if (kind is tuple or kind is list) and all(map(isinstance, value, repeat(kinds))):
        return kind(map(function, value))
    leaf = (lambda item: item) if other is None else other

    def mapped(item: Any) -> Any:
        return function(item) if isinstance(item, kinds) else copied(item)

    def copied_anew(item: Any) -> Any:
        return _copied(item, mapped, leaf)

    copied = copied_anew if each_place else once_each(copied_anew)
    return mapped(value)


def once_each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `function` with a cache by object: it is called once for each object, except numbers and text.

    So a recursive function also ends if lists contain one another at a billion places.
    """
    known: dict[int, tuple[Any, Any]] = {}

    def remembered(value: Any) -> Any:
        if isinstance(value, _SCALARS):
            return function(value)
        found = known.get(id(value))
        if found is None:
            found = known[id(value)] = value, function(value)  # with the value, whose id stays its own
        return found[1]

    return remembered


def contained(value: Any) -> Iterable[Any] | None:
    """Return what a mapping, a list or a tuple contains; None for other values."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else None


def is_numpy_scalar(value: Any) -> bool:
    """Return whether a value is a number of NumPy's, which need not be loaded."""
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def walked(value: Any, parts_of: Callable[[Any], Iterable[Any] | None] = contained) -> Iterator[Any]:
    """Yield a value and all in it in order, each container's parts once; `parts_of` returns them, or None."""
    known: dict[int, Any] = {}
    left = [value]
    while left:
        item = left.pop()
        yield item
        if id(item) not in known and (parts := parts_of(item)) is not None:
            known[id(item)] = item
            left.extend(reversed([*parts]))


def _copied(value: Any, mapped: Callable[[Any], Any], leaf: Callable[[Any], Any]) -> Any:
    """Return a container with `mapped` items, or what `leaf` makes of another value."""
    kind: Any = type(value)
    if kind in _SCALARS:  # before the slower checks: a random state has hundreds
        return leaf(value)
    if kind is tuple or kind is list:
        return kind([mapped(item) for item in value])
    if dataclasses.is_dataclass(kind):
        return _map_fields(value, mapped)
    if isinstance(value, Mapping):
        items = {key: mapped(item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return kind(items)
        changed = copy.copy(value)  # with its attributes, as state dicts have them
        for key, item in items.items():
            changed[key] = item
        return changed
    if isinstance(value, Sequence) and not isinstance(value, _NOT_CONTAINERS):
        return _map_items(value, mapped)
    return leaf(value)


def _map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    kind = type(value)
    items = list(map(function, value))
    if isinstance(value, deque):
        return kind(items, value.maxlen)
    is_named_tuple = isinstance(value, tuple) and getattr(kind, "_fields", None)
    return kind(*items) if is_named_tuple else kind(items)


def _map_fields(value: Any, function: Callable[[Any], Any]) -> Any:
    changed = copy.copy(value)
    # A subclass may do more than set an attribute, but a frozen one only refuses.
    is_frozen = type(value).__dataclass_params__.frozen
    set_field = object.__setattr__ if is_frozen else setattr
    for field in dataclasses.fields(value):
        set_field(changed, field.name, function(getattr(value, field.name)))
    for name, attribute in vars(type(value)).items():
        if isinstance(attribute, cached_property):
            vars(changed).pop(name, None)
    return changed

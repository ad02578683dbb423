"""`map_nested`: apply a function to the tensors or other values in containers and dataclasses."""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserString, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["map_nested", "map_tensors", "to_device"]

T = TypeVar("T")
_NOT_CONTAINERS = (str, bytes, bytearray, memoryview, range, array.array, UserString, torch.Size)
Kinds = type | tuple[type, ...]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `function` applied to each tensor in it; see `map_nested`."""
    return map_nested(value, Tensor, function)


def to_device(value: T, device: torch.device | str, *, non_blocking: bool = False) -> T:
    """Return `value` with every tensor on a device, but for the sizes of packed sequences, which stay."""
    moved: T = map_nested(
        value, (Tensor, PackedSequence), methodcaller("to", device, non_blocking=non_blocking)
    )
    return moved


def map_nested(
    value: Any, kinds: Kinds, function: Callable[[Any], Any], other: Callable[[Any], Any] | None = None
) -> Any:
    """Return `value` with `function` applied to each value of `kinds` in it.

    Containers and dataclasses, nested in any way, are copied and keep their types: mappings, sequences, named
    tuples, frozen dataclasses. The cached properties of dataclasses are computed anew. To all other values
    `other` is applied; without it they are the same objects.
    """
    if isinstance(value, kinds):
        return function(value)
    kind: Any = type(value)
    if kind is tuple or kind is list:  # before the slower checks, as most batches are one
        return kind([map_nested(item, kinds, function, other) for item in value])
    if dataclasses.is_dataclass(kind):
        return _map_fields(value, lambda field: map_nested(field, kinds, function, other))
    if isinstance(value, Mapping):
        items = {key: map_nested(item, kinds, function, other) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return kind(items)
        changed = copy.copy(value)  # with its attributes, as state dicts have them
        for key, item in items.items():
            changed[key] = item
        return changed
    if isinstance(value, Sequence) and not isinstance(value, _NOT_CONTAINERS):
        mapped = [map_nested(item, kinds, function, other) for item in value]
        if isinstance(value, deque):
            return kind(mapped, value.maxlen)
        is_named_tuple = isinstance(value, tuple) and getattr(kind, "_fields", None)
        return kind(*mapped) if is_named_tuple else kind(mapped)
    return value if other is None else other(value)


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

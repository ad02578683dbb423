"""`map_tensors`: apply a function to the tensors in containers and dataclasses, also in frozen ones."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

__all__ = ["map_tensors"]

_WITHOUT_TENSORS = (str, bytes, range)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `function` applied to each tensor in it; other values are the same objects.

    Containers and dataclasses, nested in any way, are copied and keep their types: mappings, sequences, named
    tuples, frozen dataclasses. The cached properties of dataclasses are computed anew.
    """
    if isinstance(value, Tensor):
        return function(value)
    kind: Any = type(value)
    if dataclasses.is_dataclass(kind):
        return _map_fields(value, function)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function) for key, item in value.items()}
        return kind(value.default_factory, items) if isinstance(value, defaultdict) else kind(items)
    if isinstance(value, Sequence) and not isinstance(value, _WITHOUT_TENSORS):
        mapped = [map_tensors(item, function) for item in value]
        is_named_tuple = isinstance(value, tuple) and getattr(kind, "_fields", None)
        return kind(*mapped) if is_named_tuple else kind(mapped)
    return value


def _map_fields(value: Any, function: Callable[[Tensor], Any]) -> Any:
    changed = copy.copy(value)
    # A subclass may do more than set an attribute, but a frozen one only refuses.
    is_frozen = type(value).__dataclass_params__.frozen
    set_field = object.__setattr__ if is_frozen else setattr
    for field in dataclasses.fields(value):
        set_field(changed, field.name, map_tensors(getattr(value, field.name), function))
    for name, attribute in vars(type(value)).items():
        if isinstance(attribute, cached_property):
            vars(changed).pop(name, None)
    return changed

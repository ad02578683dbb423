"""Read values that other processes have written as JSON; a value of another type is an error."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from rankwise.errors import ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_ANOTHER_JOB = (
    "give each job a MASTER_PORT of its own, and start every rank with the same release of rankwise; "
    "docs/security.md says who can write to a job's store."
)
_SHOWN = 80
_type_hints = cache(get_type_hints)


def read_value(store: Store, key: str, kind: type[T]) -> T:
    """Return the value of a key, as `decoded` does."""
    return decoded(kind, store.get(key), f"the value of {key!r} in the job's store")


def decoded(kind: type[T], text: bytes | str, source: str, remedy: str = _ANOTHER_JOB) -> T:
    """Return the value in a JSON text; raise `ProcessGroupError` if it is not of a type.

    `source` says where the text comes from. Types are bool, int, float, str, None, dataclasses, and list,
    dict, tuple and unions of them.
    """
    try:
        value: T = _checked(kind, json.loads(text))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        shown = repr(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
        why = f"{type(error).__name__}: {error}"[: 2 * _SHOWN]
        raise ProcessGroupError(f"What was read as {source} is damaged ({why}): {shown}.", remedy) from None
    return value


def _checked(kind: Any, value: Any) -> Any:
    """Return a value of a JSON text as a type; raise where it is not of that type."""
    if type(value) is kind:
        return value
    origin, kinds = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _type_hints(kind)
        return kind(**{name: _checked(hints[name], each) for name, each in _of(dict, value).items()})
    if origin is UnionType:
        (kind,) = {*kinds} - {NoneType}
        return None if value is None else _checked(kind, value)
    if origin is dict:
        return {_checked(kinds[0], key): _checked(kinds[1], each) for key, each in _of(dict, value).items()}
    if origin in (list, tuple):
        items = _of(list, value)
        of_items = kinds[:1] * len(items) if origin is list or kinds[-1] is ... else kinds
        return origin(_checked(of, each) for of, each in zip(of_items, items, strict=True))
    if kind is float and type(value) is int:
        return float(value)
    return _of(kind, value)


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value

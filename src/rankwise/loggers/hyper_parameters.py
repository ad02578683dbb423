"""Hyper parameters in the forms in which loggers write them."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

HyperParameters: TypeAlias = Mapping[str, Any] | Namespace


def nested_parameters(params: Any) -> Any:
    """Return hyper parameters as dictionaries, lists and values that JSON has; other values as strings."""
    if (items := _items(params)) is not None:
        return {str(name): nested_parameters(value) for name, value in items}
    if isinstance(params, (list, tuple)):
        return [nested_parameters(value) for value in params]
    return _plain(params)


def flat_parameters(params: HyperParameters) -> dict[str, bool | int | float | str | None]:
    """Return hyper parameters in one dictionary, nested names joined by "/"; other values as strings.

    Example:
        >>> flat_parameters({"optimizer": {"lr": 0.1}, "layers": [8, 8]})
        {'optimizer/lr': 0.1, 'layers': '[8, 8]'}
    """
    return dict(_flat("", params))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = _items(value)
    if items is None:
        yield prefix, _plain(value)
    elif not items and prefix:
        yield prefix, "{}"
    for name, item in items or ():
        yield from _flat(f"{prefix}/{name}" if prefix else str(name), item)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of what has names, and None for other values."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Namespace):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _plain(value: Any) -> Any:
    is_number = getattr(value, "shape", None) == () and type(value).__module__ == "numpy"
    if is_number or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

"""Convert hyperparameters, metrics and images to the forms in which loggers write them."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from rankwise.nested import is_numpy_scalar, once_each

HyperParameters: TypeAlias = Mapping[str, Any] | Namespace


def nested_parameters(params: Any) -> Any:
    """Return hyper parameters as dictionaries, lists and values that JSON has; other values as strings."""

    @once_each
    def nested(value: Any) -> Any:
        if (items := _items(value)) is not None:
            return {str(name): nested(item) for name, item in items}
        return [nested(item) for item in value] if isinstance(value, (list, tuple)) else _plain(value)

    return nested(params)


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
    if is_numpy_scalar(value) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def numbers(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return metrics as Python's numbers, with `prefix-` before each name if there is a prefix."""
    return {
        f"{prefix}-{name}" if prefix else name: value.item() if isinstance(value, Tensor) else value
        for name, value in metrics.items()
    }


def image_array(image: Any) -> Any:
    """Return an image as a NumPy array, of shape (height, width) or (height, width, channels).

    Args:
        image: a tensor of shape (channels, height, width) or (height, width), a NumPy array with the channels
            last, or an image of Pillow. Floating-point values are from 0 to 1, integers from 0 to 255.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        return (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    import numpy as np

    return np.asarray(image)

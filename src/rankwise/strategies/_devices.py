"""Turn `accelerator` and `devices` into the devices of this node's ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, UnknownNameError
from rankwise.strategies._arguments import check_choice

ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_STRATEGIES = ("ddp", "ddp_spawn", "ddp_cpu", "ddp2", "dp", "horovod")  # accelerators in Lightning before 1.5
_EXPECTED = 'a number of devices from 1 up, "auto" (or -1: all), or a list of different device indices'


def device_type(accelerator: object) -> str:
    """Return `"cpu"` or `"cuda"`.

    Raises:
        UnknownNameError: for an accelerator that is not known.
        ConfigurationError: when it is not there.
    """
    if accelerator in _STRATEGIES:
        raise UnknownNameError(
            kind="accelerator",
            name=str(accelerator),
            known=ACCELERATORS,
            remedy='a strategy is meant: Trainer(strategy="ddp").',
        )
    wanted = check_choice("accelerator", accelerator, ACCELERATORS)
    has_cuda = torch.cuda.device_count() > 0
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    if wanted == "cpu":
        return "cpu"
    if not has_cuda:
        raise ConfigurationError(
            message=f"accelerator={accelerator!r} is not possible: torch sees no CUDA device.",
            facts=f"torch {torch.__version__}, torch.cuda.device_count() is 0.",
            remedy='use accelerator="cpu" or "auto".',
        )
    return "cuda"


def check_devices(devices: object) -> int | tuple[int, ...] | None:
    """Return a count, a tuple of indices, or None for "as many as there are".

    Raises:
        InvalidTypeError: for a value of another kind, such as a float.
        InvalidArgumentError: for a count or an index that cannot be.
    """
    if isinstance(devices, str):
        return _parse(devices)
    if isinstance(devices, bool) or not isinstance(devices, (int, list, tuple)):
        raise InvalidTypeError(argument="devices", value=devices, expected=_EXPECTED)
    if isinstance(devices, int):
        return _check_count(devices)
    return _check_indices(devices)


def check_num_nodes(num_nodes: object) -> int | None:
    """Return a count, or None for "as many as there are".

    Raises:
        InvalidTypeError, InvalidArgumentError: as `check_devices`.
    """
    if num_nodes == "auto":
        return None
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int):
        raise InvalidTypeError(
            argument="num_nodes", value=num_nodes, expected='a number from 1 up, or "auto"'
        )
    if num_nodes < 1:
        raise InvalidArgumentError(
            argument="num_nodes", value=num_nodes, expected='a number from 1 up, or "auto"'
        )
    return num_nodes


def local_devices(
    kind: str, devices: int | tuple[int, ...] | None, started: int | None
) -> list[torch.device]:
    """Return the device of each local rank, in order.

    Args:
        kind: `"cpu"` or `"cuda"`.
        devices: what `check_devices` returned.
        started: how many local ranks an outer launcher has started, None where nobody has.

    Raises:
        InvalidArgumentError: when more are asked for than there are.
    """
    if kind == "cpu":
        count = len(devices) if isinstance(devices, tuple) else devices
        return [torch.device("cpu")] * (count or started or 1)
    available = torch.cuda.device_count()
    if isinstance(devices, tuple):
        indices = devices
    elif started is not None and available < started:
        indices = (0,) * (devices or started)  # each rank was given one visible device of its own
    else:
        indices = tuple(range(devices or started or available))
    if max(indices) >= available:
        expected = f"devices that exist: torch sees {available}"
        raise InvalidArgumentError(argument="devices", value=devices, expected=expected)
    return [torch.device("cuda", index) for index in indices]


def _parse(text: str) -> int | tuple[int, ...] | None:
    if text == "auto":
        return None
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidArgumentError(argument="devices", value=text, expected=_EXPECTED) from None
    if not numbers:
        raise InvalidArgumentError(argument="devices", value=text, expected=_EXPECTED)
    return _check_indices(numbers) if "," in text else _check_count(numbers[0])


def _check_count(count: int) -> int | None:
    if count == -1:
        return None
    if count < 1:
        raise InvalidArgumentError(argument="devices", value=count, expected=_EXPECTED)
    return count


def _check_indices(indices: Sequence[object]) -> tuple[int, ...]:
    numbers = tuple(index for index in indices if isinstance(index, int) and not isinstance(index, bool))
    is_whole = len(numbers) == len(indices) > 0
    if not is_whole or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise InvalidArgumentError(argument="devices", value=list(indices), expected=_EXPECTED)
    return numbers

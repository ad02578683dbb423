"""Check what a strategy is constructed with, before any process starts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    UnknownArgumentError,
    UnknownNameError,
)

START_METHODS = ("popen", "spawn", "fork", "forkserver")
_LONGEST = timedelta(days=365)
RENDEZVOUS = ("auto", "private", "tcp")

# What a strategy passes to the wrapper itself.
_OWN_DDP_ARGUMENTS = ("self", "module", "device_ids", "output_device", "dim", "process_group")


def check_choice(kind: str, value: object, choices: tuple[str, ...]) -> str:
    """Return a name in lower case.

    Raises:
        InvalidTypeError: when it is no string.
        UnknownNameError: when it is none of the choices.
    """
    if not isinstance(value, str):
        raise InvalidTypeError(argument=kind, value=value, expected=f"one of {', '.join(map(repr, choices))}")
    if value.lower() not in choices:
        raise UnknownNameError(kind=kind, name=value, known=choices)
    return value.lower()


def check_timeout(name: str, value: object) -> timedelta:
    """Return a duration given as a `timedelta` or in seconds.

    Raises:
        InvalidTypeError: when it is neither.
        InvalidArgumentError: when it is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, timedelta)):
        raise InvalidTypeError(
            argument=name,
            value=value,
            expected="a number of seconds or a datetime.timedelta",
            remedy=f"{name}=timedelta(seconds=...)",
        )
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (ValueError, OverflowError):  # not a number, or infinite
        duration = timedelta(0)
    if not timedelta(0) < duration <= _LONGEST:
        raise InvalidArgumentError(argument=name, value=value, expected=f"a duration from 0 to {_LONGEST}")
    return duration


def check_grace_period(value: object) -> float:
    """Return a number of seconds, which may be 0.

    Raises:
        InvalidTypeError: when it is no number.
        InvalidArgumentError: when it is negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(argument="grace_period_s", value=value, expected="a number of seconds")
    longest = _LONGEST.total_seconds()
    if not 0 <= value <= longest:  # false for what is not a number
        raise InvalidArgumentError(
            argument="grace_period_s", value=value, expected=f"0 to {longest:g} seconds"
        )
    return float(value)


def check_instance(name: str, value: object, kind: type) -> None:
    """Make sure that a plug-in is an instance.

    Raises:
        InvalidTypeError: when it is not, a class included.
    """
    if not isinstance(value, kind):
        raise InvalidTypeError(
            argument=name,
            value=value,
            expected=f"an instance of {kind.__name__}",
            remedy=f"make an instance of it: {value.__name__}()" if isinstance(value, type) else "",
        )


def check_command(value: object) -> tuple[str, ...] | None:
    """Return a command as its words, or None.

    Raises:
        InvalidTypeError: for anything but a list of at least one string.
    """
    if value is None:
        return None
    words = tuple(value) if isinstance(value, (list, tuple)) else ()
    if not words or not all(isinstance(word, str) for word in words):
        raise InvalidTypeError(
            argument="command",
            value=value,
            expected="a list of strings",
            remedy='command=[sys.executable, "train.py"]',
        )
    return words


def check_ddp_arguments(target: str, own: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords for `DistributedDataParallel`, as this version of torch takes them.

    Raises:
        UnknownArgumentError: for a keyword that neither the strategy nor the wrapper takes.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    known = tuple(name for name in parameters if name not in _OWN_DDP_ARGUMENTS)
    for name in given:
        if name not in known:
            raise UnknownArgumentError(target=target, name=name, known=(*known, *own))
    return {"find_unused_parameters": False, **given}


def from_parallel_devices(given: Sequence[torch.device]) -> tuple[str, int | list[int]]:
    """Return the accelerator and devices that a list of devices stands for.

    Raises:
        InvalidTypeError: when it is no list of devices of one type.
    """
    is_list = isinstance(given, (list, tuple))
    if not is_list or not given or not all(isinstance(device, torch.device) for device in given):
        raise InvalidTypeError(argument="parallel_devices", value=given, expected="a list of torch.device")
    kinds = {device.type for device in given}
    if len(kinds) != 1:
        raise InvalidTypeError(argument="parallel_devices", value=given, expected="devices of one type")
    if kinds == {"cpu"}:
        return "cpu", len(given)
    return kinds.pop(), [device.index or 0 for device in given]


def check_platform(start_method: str) -> None:
    """Make sure that a start method exists here.

    Raises:
        ConfigurationError: when it does not.
    """
    if start_method in ("fork", "forkserver") and sys.platform == "win32":
        raise ConfigurationError(
            message=f"start_method={start_method!r} does not exist on Windows.",
            remedy='use strategy="ddp" or "ddp_spawn".',
        )

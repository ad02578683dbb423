"""The attributes of an object that a stage has changed: what of them goes back to the calling process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from rankwise.processes.shared_memory import can_be_packed

_OF_TORCH = frozenset(vars(nn.Module())) | {"_trainer", "_compiled_call_impl"}
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# The calling process has given the data, and its `configure_optimizers` makes optimizers; a handle belongs to
# the hooks of one process.
_STAY_THERE = (Dataset, DataLoader, Sampler, Optimizer, LRScheduler, RemovableHandle)


def changed_attributes(owner: object, before: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an object's plain attributes that may have changed, and the names of those that cannot be sent.

    Neither has data, optimizers, schedulers and handles of hooks, nor what `__getstate__` leaves out.
    """
    state = _state_of(owner)
    changed, lost = {}, []
    for name, value in vars(owner).items():
        is_kept = name in _OF_TORCH or state.get(name) is not value
        is_same = value is before.get(name, _OF_TORCH)
        if is_kept or (is_same and isinstance(value, _CONSTANTS)) or _holds(value, _STAY_THERE):
            continue
        if can_be_packed(value):
            changed[name] = value
        elif not is_same or isinstance(value, (list, dict, set)):
            lost.append(name)
    return changed, lost


def _state_of(owner: Any) -> dict[str, Any]:
    """Return the attributes with which an object is pickled; none if that fails."""
    if isinstance(owner, nn.Module) and parametrize.is_parametrized(owner):  # whose method only raises
        return vars(owner)
    try:
        state = owner.__getstate__()
    except Exception:  # noqa: BLE001  pickling runs anybody's code
        return {}
    return state if isinstance(state, dict) else {}


def _holds(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value, or an item of it, is of some kind; a container may contain itself."""
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, kinds):
            return True
        if type(item) in (list, tuple, dict) and id(item) not in seen:
            seen.add(id(item))
            left.extend(item.values() if type(item) is dict else item)
    return False


def updated(current: Any, value: Any) -> Any:
    """Return `current` with the contents of `value`, if it can be changed in place; otherwise `value`."""
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

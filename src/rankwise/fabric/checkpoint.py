"""Collect and restore the states of modules, optimizers and other objects, for `Fabric.save` and `load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rankwise.checkpoint.base import restored_from
from rankwise.checks import check_callable, check_is_a, check_value
from rankwise.errors import CheckpointError, ConfigurationError, InvalidTypeError
from rankwise.fabric.wrappers import FabricDataLoader, FabricModule, FabricOptimizer
from rankwise.strategies import Strategy

PRECISION = "rankwise_precision"
"""The key of the precision's state, such as the loss scale and master weights; where it has one."""

Filters = Mapping[str, Callable[[str, Any], bool]]


def check_filters(filters: Any, state: Mapping[str, Any]) -> None:
    """Raise unless `filters` are functions, by keys of `state`."""
    check_is_a("filter", filters, Mapping, "a dictionary of functions")
    for key, function in filters.items():
        if key not in state:
            raise ConfigurationError(
                message=f"filter has the key {key!r}, which is not in state.",
                facts=f"state has {', '.join(map(repr, state))}.",
                remedy="give a filter for a part of the state.",
            )
        expected = "a function that takes a name and a value, and returns a bool"
        check_callable(f"filter[{key!r}]", function, expected)


def checkpoint_of(strategy: Strategy, state: Mapping[str, Any], filters: Filters) -> dict[str, Any]:
    """Return the checkpoint of a state. Collective: every rank must call this."""
    checkpoint = {key: _state_of(strategy, value) for key, value in state.items()}
    for key, keeps in filters.items():
        has_state = isinstance(checkpoint[key], Mapping)
        check_value(
            f"state[{key!r}]", state[key], has_state, "an object with a state", error=InvalidTypeError
        )
        checkpoint[key] = {name: value for name, value in checkpoint[key].items() if keeps(name, value)}
    if own := strategy.precision.state_dict():
        checkpoint[PRECISION] = own
    return checkpoint


def _state_of(strategy: Strategy, value: Any) -> Any:
    match value:
        case FabricModule():
            return strategy.get_module_state_dict(value.wrapped)
        case FabricDataLoader():
            return _state_of(strategy, value.loader)
        case FabricOptimizer():
            return value.state_dict()
        case Optimizer():
            return strategy.get_optimizer_state(value)
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def restore_state(
    strategy: Strategy, path: str, checkpoint: dict[str, Any], state: dict[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Restore the objects in `state`, and replace its values; return the rest of the checkpoint."""
    if strict and (missing := [key for key in state if key not in checkpoint]):
        raise CheckpointError(
            path=path,
            problem=f"it has no {missing[0]!r}, only {', '.join(map(repr, checkpoint)) or 'nothing'}",
            remedy="pass the file that was saved with this state, or strict=False.",
        )
    left = dict(checkpoint)
    precision = left.pop(PRECISION, None)
    for key in [key for key in state if key in left]:
        saved = left.pop(key)
        if not restore_object(strategy, path, key, state[key], saved, strict=strict):
            state[key] = saved
    if precision is not None:
        with restored_from(path, "precision"):
            strategy.precision.load_state_dict(precision)
    return left


def restore_object(
    strategy: Strategy, path: str, name: str, target: Any, saved: Any, *, strict: bool
) -> bool:
    """Load a state into an object, in place; return False if it keeps no state."""
    target = target.loader if isinstance(target, FabricDataLoader) else target
    if not callable(getattr(target, "load_state_dict", None)):
        return False
    with restored_from(path, repr(name)):
        if isinstance(target, FabricModule):
            strategy.load_module_state_dict(target.wrapped, saved, strict=strict)
            strategy.precision.reload_weights()
        elif isinstance(target, nn.Module):
            target.load_state_dict(saved, strict=strict)
        else:
            target.load_state_dict(saved)
    return True

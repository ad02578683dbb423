"""The checks of what a Fabric is given."""

from __future__ import annotations

import torch
from torch import nn

from rankwise.checks import check_is_a
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from rankwise.fabric.module import FabricModule
from rankwise.strategies import Strategy


def check_strategy(strategy: Strategy) -> None:
    """Refuse options of a strategy that need to see the loop."""
    if strategy.gradient_weighting == "samples":
        raise ConfigurationError(
            message='gradient_weighting="samples" cannot be used with Fabric: it does not see which batch a '
            "loss belongs to.",
            remedy='gradient_weighting="logged", and fabric.backward(loss, weight=n).',
        )


def check_unwrapped(value: object, kind: type, wrapper: type, name: str) -> None:
    """Raise unless the user's own object is given; an object that was set up before is refused."""
    check_is_a(name, value, kind)
    if isinstance(value, wrapper):
        expected = f"one that was not set up before: {name}s are set up once"
        raise InvalidArgumentError(argument=name, value=type(value).__name__, expected=expected)


def check_set_up(module: object) -> FabricModule:
    """Return a module that was set up; refuse any other."""
    if isinstance(module, FabricModule):
        return module
    remedy = "module = fabric.setup(module)"
    expected = "what Fabric.setup() returned"
    raise InvalidTypeError(argument="module", value=module, expected=expected, remedy=remedy)


def check_is_on(module: nn.Module, device: torch.device) -> None:
    """Refuse a module with parameters on another device."""
    elsewhere = [name for name, each in module.named_parameters() if each.device != device]
    if elsewhere:
        raise ConfigurationError(
            message=f"move_to_device=False, but {elsewhere[0]!r} is not on this rank's device.",
            facts=f"{len(elsewhere)} parameters are not on {device}, where the wrapper needs them.",
            remedy="leave it out, or call fabric.to_device(module) first.",
        )

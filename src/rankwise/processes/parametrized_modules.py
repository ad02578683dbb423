"""Modules that `torch.nn.utils.parametrize` has given a class of their own, which pickle cannot name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

ParametrizedClass = tuple[type[nn.Module], tuple[str, ...]]
"""The class of a module before any parametrization, and the names of its parametrized tensors."""


def kind_of(module: nn.Module) -> ParametrizedClass:
    """Return a module's class, and its parametrized tensors."""
    if not parametrize.is_parametrized(module):
        return type(module), ()
    parametrizations: Any = module.parametrizations
    return parametrize.type_before_parametrizations(module), tuple(parametrizations)


def set_kind(module: nn.Module, kind: ParametrizedClass) -> None:
    """Give a module a class, in which some tensors are parametrized; its parts still have to be set."""
    if kind_of(module) == kind:
        return
    module.__class__, names = kind
    module._modules.pop("parametrizations", None)
    for name in names:
        for parts in (module._parameters, module._buffers, vars(module)):
            parts.pop(name, None)
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)


def reduced(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Return the data with which pickle creates a parametrized module again."""
    own, (base, names) = type(module), kind_of(module)
    try:
        module.__class__ = base
        parts: Any = module.__reduce_ex__(protocol)
    finally:
        module.__class__ = own
    make, arguments, *state = parts
    return _rebuilt, (make, arguments, names), *state


def _rebuilt(make: Callable[..., nn.Module], arguments: Iterable[Any], names: tuple[str, ...]) -> nn.Module:
    module = make(*arguments)
    if "_modules" not in vars(module):
        nn.Module.__init__(module)
    set_kind(module, (type(module), names))
    return module

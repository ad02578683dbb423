"""`ModuleState` and `ObjectState`: what a stage has changed of objects that the calling process has, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from rankwise.processes.changed_attributes import (
    AttributesBefore,
    changed_attributes,
    updated,
    with_contents,
)
from rankwise.processes.parametrized_modules import kind_of, set_kind
from rankwise.processes.shared_memory import Unreadable


def named_parts(module: nn.Module) -> dict[str, object]:
    """Return a module's submodules, their classes, and its parameters, by names that its copies have too."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return {
        **{f"class {name}": kind_of(part)[0] for name, part in modules.items()},
        **{f"module {name}": part for name, part in modules.items()},
        **{f"parameter {name}": part for name, part in module.named_parameters(remove_duplicate=False)},
    }


@final
class ModuleBefore:
    """A module as it is when a stage starts; `named` are the objects that are sent by name.

    Attributes:
        parts: its `named_parts`.
        attributes: those of its submodules, by the submodule's id.
    """

    def __init__(self, module: nn.Module, named: Mapping[str, object]) -> None:
        self.parts = named_parts(module)
        self.attributes = {id(part): AttributesBefore(part, named) for part in module.modules()}


@final
class ModuleState:
    """What a stage has made of a module. Picklable where `before.parts` are sent by name."""

    def __init__(self, module: nn.Module, before: ModuleBefore) -> None:
        present = set(map(id, module.modules()))
        self._values = {
            name: _value_of(part) for name, part in before.parts.items() if isinstance(part, nn.Parameter)
        }
        self._contents = {  # other submodules are in these
            name: _Contents(part, before.attributes[id(part)])
            for name, part in before.parts.items()
            if isinstance(part, nn.Module) and id(part) in present
        }

    @property
    def lost(self) -> list[str]:
        """The names of attributes that may have changed, but cannot be sent."""
        parts = {name.removeprefix("module "): each.attributes for name, each in self._contents.items()}
        return [f"{name}.{lost}".removeprefix(".") for name, each in parts.items() for lost in each.lost]

    def restore(self, module: nn.Module) -> None:
        """Give it to the calling process's module; parameters and submodules stay the same objects."""
        parts: dict[str, Any] = named_parts(module)
        for name, value in self._values.items():
            if value is not None:
                _put(parts[name], *value)
        for name, contents in self._contents.items():
            contents.give_to(parts[name])


@final
class ObjectState:
    """The attributes of an object that a stage has changed; `before` are those when it started.

    Attributes:
        lost: the names of attributes that may have changed, but cannot be sent.
    """

    def __init__(self, owner: object, before: AttributesBefore) -> None:
        self._changed, self.lost = changed_attributes(owner, before)
        self._removed = [name for name in before.values if name not in vars(owner)]

    def give_to(self, owner: object, *, removes: bool = True) -> None:
        """Give an object these attributes; with `removes`, take away those that the stage has removed."""
        attributes = vars(owner)
        for name in self._removed if removes else ():
            attributes.pop(name, None)
        unreadable = {}
        for name, value in self._changed.items():
            new = updated(attributes.get(name), value)
            if isinstance(new, Unreadable):
                unreadable[name] = new.reason
            else:
                attributes[name] = new
        if unreadable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in unreadable.items())
            warnings.warn(
                f"These attributes of {type(owner).__name__} were set in a worker process, and cannot be "
                f"read in the calling process, where they stay as they are: {reasons}.",
                stacklevel=2,
            )


@final
class _Contents:
    """What one submodule consists of; `before` are its attributes when the stage started."""

    def __init__(self, module: nn.Module, before: AttributesBefore) -> None:
        self.attributes = ObjectState(module, before)
        self._kind = kind_of(module)
        self._modules = dict(module._modules.items())
        self._parameters = dict(module._parameters.items())
        self._buffers = dict(module._buffers.items())
        self._transient = module._non_persistent_buffers_set
        self._training = module.training
        self._hooks = list(_reparametrizing_hooks(module).values())

    def give_to(self, module: nn.Module) -> None:
        """Make a module consist of it. Buffers keep their identity, if their shape and dtype allow it."""
        buffers = {name: _kept(module._buffers.get(name), value) for name, value in self._buffers.items()}
        is_lazy_module = isinstance(module, LazyModuleMixin)  # it changes its class itself when it is called
        if not is_lazy_module:
            set_kind(module, self._kind)
        self.attributes.give_to(module, removes=not is_lazy_module)
        _replace(module, module._modules, self._modules)
        _replace(module, module._parameters, self._parameters)
        _replace(module, module._buffers, buffers)
        module._non_persistent_buffers_set = self._transient
        module.training = self._training
        for key in _reparametrizing_hooks(module):
            del module._forward_pre_hooks[key]
        for hook in self._hooks:
            module.register_forward_pre_hook(hook)


def warn_of_lost_attributes(module: ModuleState, others: Iterable[tuple[str, ObjectState]]) -> None:
    """Warn of attributes that cannot be sent: of the module, and of other objects, which have names."""
    lost = [*module.lost, *(f"{name}.{attribute}" for name, each in others for attribute in each.lost)]
    if lost:
        warnings.warn(
            "These attributes of the module, its data module or callbacks were set in a worker process, and "
            f"cannot be pickled: {', '.join(lost)}. They stay as they are in the calling process. Set what "
            "can be pickled, or delete the others in teardown().",
            stacklevel=2,
        )


def _value_of(parameter: nn.Parameter) -> tuple[Tensor, bool] | None:
    is_empty = isinstance(parameter, UninitializedParameter)
    return None if is_empty else (parameter.detach(), parameter.requires_grad)


def _put(parameter: nn.Parameter, value: Tensor, requires_grad: bool) -> None:
    """Set a parameter, in place if its shape and dtype allow it."""
    if isinstance(parameter, UninitializedParameter):
        parameter.materialize(value.shape, dtype=value.dtype)
    if parameter.shape != value.shape or parameter.dtype != value.dtype:
        parameter.data = value  # the stage converted it
    else:
        with torch.no_grad():
            parameter.copy_(value)
    parameter.requires_grad_(requires_grad)


def _reparametrizing_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks of torch's `weight_norm`, `spectral_norm` and pruning, which compute a tensor."""
    hooks = module._forward_pre_hooks.items()
    return {key: hook for key, hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")}


def _replace(owner: nn.Module, mapping: dict[str, Any], new: dict[str, Any]) -> None:
    if list(map(id, mapping.values())) == list(map(id, new.values())) and list(mapping) == list(new):
        return
    for name in new:
        owner.__dict__.pop(name, None)  # a plain attribute hides it
    mapping.clear()
    mapping.update(new)


def _kept(current: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Return the buffer that has the value: the current one, changed in place, if that is possible."""
    if current is None or value is None or is_lazy(current) or is_lazy(value):
        return value
    return with_contents(current, value)

"""`ModuleState` and `ObjectState`: what a stage has changed of objects that the calling process has, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy
from typing_extensions import Self

from rankwise.processes.changed_attributes import (
    AttributesBefore,
    changed_attributes,
    updated,
    with_contents,
)
from rankwise.processes.parametrized_modules import kind_of, set_kind
from rankwise.processes.shared_memory import Parts, Unreadable


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
        attributes: the attributes of its submodules, by the submodule's id.
    """

    def __init__(self, module: nn.Module, named: Mapping[str, object]) -> None:
        self.parts = named_parts(module)
        self.attributes = {id(part): AttributesBefore(part, named) for part in module.modules()}


@final
class ModuleState:
    """The state of a module after a stage. Picklable if `before.parts` are sent by name."""

    def __init__(self, module: nn.Module, before: ModuleBefore) -> None:
        present = set(map(id, module.modules()))
        self._values = Parts(
            {name: _value_of(part) for name, part in before.parts.items() if isinstance(part, nn.Parameter)}
        )
        self._contents = Parts(  # other submodules are in these
            {
                name: _Contents(part, before.attributes[id(part)])
                for name, part in before.parts.items()
                if isinstance(part, nn.Module) and id(part) in present
            }
        )

    @property
    def lost(self) -> list[str]:
        """The names of attributes that may have changed, but cannot be sent."""
        parts = {name.removeprefix("module "): each.attributes for name, each in self._contents.items()}
        return [f"{name}.{lost}".removeprefix(".") for name, each in parts.items() for lost in each.lost]

    def restore(self, module: nn.Module, lost: NotReturned) -> None:
        """Give it to the calling process's module; parameters and submodules stay the same objects.

        The weights come first. Parts that cannot be returned are `lost`, and stay as they are.
        """
        parts: dict[str, Any] = named_parts(module)
        for name, value in self._values.items():
            if value is not None:
                lost.unless(name, value, partial(_put, parts[name]))
        for name, contents in self._contents.items():
            lost.unless(name, contents, partial(_Contents.give_to, module=parts[name], name=name, lost=lost))


class NotReturned:
    """Collects what cannot be returned to the calling process; warns at the end of the block."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._reasons:
            warnings.warn(
                "These parts of what a worker process has trained cannot be returned to the calling process, "
                f"where they stay as they are: {'; '.join(self._reasons)}.",
                stacklevel=2,
            )

    def unless(self, name: str, value: Any, give: Callable[[Any], object]) -> bool:
        """Call `give(value)`; note the name where the value could not be packed or read, or that raises.

        Returns:
            Whether the value was returned.
        """
        try:
            reason = value.reason if isinstance(value, Unreadable) else None
            if reason is None:
                give(value)
        except Exception as error:  # noqa: BLE001  the user's classes load their own states
            reason = Unreadable.because_of(error).reason
        if reason is not None:
            self._reasons.append(f"{name.strip()} ({reason})")
        return reason is None


@final
class ObjectState:
    """The attributes of an object that a stage has changed; `before` are the attributes at its start.

    Attributes:
        lost: the names of attributes that may have changed, but cannot be sent.
    """

    def __init__(self, owner: object, before: AttributesBefore) -> None:
        changed, self.lost = changed_attributes(owner, before)
        self._changed = Parts(changed)
        self._removed = [name for name in before.values if name not in vars(owner)]

    def give_to(self, owner: object, *, removes: bool = True) -> None:
        """Give an object these attributes; with `removes`, delete the ones that the stage has deleted."""
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
    """The parts of one submodule; `before` are its attributes when the stage started."""

    def __init__(self, module: nn.Module, before: AttributesBefore) -> None:
        self.attributes = ObjectState(module, before)
        self._kind = Parts({"class": kind_of(module)})
        self._modules = Parts(module._modules)
        self._parameters = Parts(module._parameters)
        self._buffers = Parts(module._buffers)
        self._transient = module._non_persistent_buffers_set
        self._training = module.training
        self._hooks = Parts(
            {f"hook {number}": hook for number, hook in enumerate(_reparametrizing_hooks(module).values())}
        )

    def give_to(self, module: nn.Module, name: str, lost: NotReturned) -> None:
        """Make a module consist of it. Buffers keep their identity, if their shape and dtype allow it.

        `name` is the module's, for what is `lost`.
        """
        parts = {**self._kind, **self._modules, **self._parameters, **self._buffers, **self._hooks}
        for part, value in parts.items():
            lost.unless(f"{name.strip()}.{part}", value, lambda _: None)
        buffers = _readable(self._buffers, module._buffers)
        buffers = {name: _kept(module._buffers.get(name), value) for name, value in buffers.items()}
        modules = _readable(self._modules, module._modules)
        parameters = _readable(self._parameters, module._parameters)
        is_lazy_module = isinstance(module, LazyModuleMixin)  # it changes its class itself when it is called
        if not is_lazy_module and not isinstance(kind := self._kind["class"], Unreadable):
            set_kind(module, kind)
        attributes = partial(ObjectState.give_to, owner=module, removes=not is_lazy_module)
        lost.unless(f"attributes of {name}", self.attributes, attributes)
        _replace(module, module._modules, modules)
        _replace(module, module._parameters, parameters)
        _replace(module, module._buffers, buffers)
        module._non_persistent_buffers_set = self._transient
        module.training = self._training
        if not any(isinstance(hook, Unreadable) for hook in self._hooks.values()):
            for key in _reparametrizing_hooks(module):
                del module._forward_pre_hooks[key]
            for hook in self._hooks.values():
                module.register_forward_pre_hook(hook)


def _readable(new: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new items, and for those that could not be packed or read the current ones, if there are."""
    return {
        name: current[name] if isinstance(value, Unreadable) else value
        for name, value in new.items()
        if name in current or not isinstance(value, Unreadable)
    }


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


def _put(parameter: nn.Parameter, new: tuple[Tensor, bool]) -> None:
    """Set a parameter, in place if its shape and dtype allow it."""
    value, requires_grad = new
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

"""`ReturnedState`: the changes that a stage has made in a worker process, for the calling process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from typing_extensions import Self

from rankwise.nested import map_tensors
from rankwise.processes.changed_attributes import AttributesBefore, ObjectState, updated, with_contents
from rankwise.processes.memory_file import Parts, Unreadable, send_by_name
from rankwise.processes.parametrized_modules import kind_of, set_kind


@final
class KnownToCaller:
    """The objects of a stage that the calling process also has.

    Attributes:
        module: the module.
        owners: the objects that the stage may give other attributes, by the names that warnings have.
        others: objects that are only sent by name.
        named: all objects that are sent by name.
    """

    def __init__(self, module: nn.Module, owners: Mapping[str, object], others: Mapping[str, object]) -> None:
        self.module = module
        self.owners, self.others = owners, others
        self.named = {
            **named_parts(module),
            **others,
            **{f"owner {name}": each for name, each in owners.items()},
        }


@final
class StateBefore:
    """These objects as they are when a stage starts in a worker process.

    Attributes:
        parts: the module's `named_parts`.
        attributes: the attributes of its submodules and of the owners, by the object's id.
    """

    def __init__(self, known: KnownToCaller) -> None:
        self.known = known
        self.parts = named_parts(known.module)
        objects = [*known.module.modules(), *known.owners.values()]
        self.attributes = {id(each): AttributesBefore(each, known.named) for each in objects}


@final
class ReturnedState:
    """The state of these objects after a stage, and other parts by name; picklable, on the CPU.

    Creating it sends the objects that the calling process has by name from then on. If a part cannot
    be created, packed or read, only that part is missing.
    """

    def __init__(self, before: StateBefore, parts: Mapping[str, Callable[[], Any]]) -> None:
        known = before.known
        send_by_name(known.named)
        present = set(map(id, known.module.modules()))
        submodules = {
            name: part
            for name, part in before.parts.items()
            if isinstance(part, nn.Module) and id(part) in present
        }
        self._values = Parts(
            {name: _value_of(part) for name, part in before.parts.items() if isinstance(part, nn.Parameter)}
        )
        self._members = {name: _Members(part) for name, part in submodules.items()}  # has all new submodules
        self._attributes = {
            name: ObjectState(owner, before.attributes[id(owner)])
            for name, owner in {**submodules, **known.owners}.items()
        }
        self._parts = Parts({name: captured(part) for name, part in parts.items()})

    def restore(self, known: KnownToCaller, give: Mapping[str, Callable[[Any], object]]) -> set[str]:
        """Give it to the calling process's objects: weights first; parameters stay the same objects.

        A part that cannot be returned stays as it is, with a warning that names it.

        Args:
            known: the objects.
            give: restores a part, by its name.

        Returns:
            The names of the other parts that could not be returned.
        """
        parts: dict[str, Any] = named_parts(known.module)
        with _NotReturned() as lost:
            for name, value in self._values.items():
                if value is not None:
                    lost.unless(name, value, partial(_put, parts[name]))
            for name, members in self._members.items():
                attributes = self._attributes[name]
                give_all = partial(
                    _Members.give_to, module=parts[name], name=name, lost=lost, attributes=attributes
                )
                lost.unless(name, members, give_all)
            for name, owner in known.owners.items():
                give_attributes = partial(ObjectState.give_to, owner=owner)
                lost.unless(f"attributes of {name}", self._attributes[name], give_attributes)
            return {name for name, part in self._parts.items() if not lost.unless(name, part, give[name])}


def captured(part: Callable[[], Any]) -> Any:
    """Return a part of a state, on the CPU; an `Unreadable` if it cannot be created."""
    try:
        return map_tensors(part(), lambda tensor: tensor.detach().cpu())
    except Exception as error:  # noqa: BLE001  the user's classes have their own states
        return Unreadable.because_of(error)


def named_parts(module: nn.Module) -> dict[str, object]:
    """Return a module's submodules, their classes, and its parameters, by names that its copies have too."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return {
        **{f"class {name}": kind_of(part)[0] for name, part in modules.items()},
        **{f"module {name}": part for name, part in modules.items()},
        **{f"parameter {name}": part for name, part in module.named_parameters(remove_duplicate=False)},
    }


class _NotReturned:
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


_KINDS = ("_modules", "_parameters", "_buffers")


@final
class _Members:
    """The parts of one submodule: its class, its submodules, parameters, buffers and some hooks."""

    def __init__(self, module: nn.Module) -> None:
        hooks = enumerate(_reparametrizing_hooks(module).values())
        members: dict[tuple[str, ...], Any] = {
            (kind, name): each for kind in _KINDS for name, each in getattr(module, kind).items()
        }
        members |= {("hooks", f"hook {number}"): hook for number, hook in hooks}
        self._parts = Parts({("class",): kind_of(module), **members})
        self._transient = module._non_persistent_buffers_set
        self._training = module.training

    def give_to(self, module: nn.Module, name: str, lost: _NotReturned, attributes: ObjectState) -> None:
        """Give a module these parts and attributes.

        Buffers stay the same objects, if their shape and dtype allow it. `name` is the module's, for what is
        `lost`.
        """
        readable: dict[tuple[str, ...], Any] = {}
        for key, value in self._parts.items():
            lost.unless(f"{name.strip()}.{key[-1]}", value, partial(readable.__setitem__, key))
        new = {kind: self._members_of(kind, getattr(module, kind), readable) for kind in _KINDS}
        is_lazy_module = isinstance(module, LazyModuleMixin)  # it changes its class itself when it is called
        if not is_lazy_module and ("class",) in readable:
            set_kind(module, readable["class",])
        give = partial(ObjectState.give_to, owner=module, removes=not is_lazy_module)
        lost.unless(f"attributes of {name}", attributes, give)
        for kind in _KINDS:
            _replace(module, getattr(module, kind), new[kind])
        module._non_persistent_buffers_set = self._transient
        module.training = self._training
        hooks = [key for key in self._parts if key[0] == "hooks"]
        if all(key in readable for key in hooks):
            for number in _reparametrizing_hooks(module):
                del module._forward_pre_hooks[number]
            for key in hooks:
                module.register_forward_pre_hook(readable[key])

    def _members_of(
        self, kind: str, current: Mapping[str, Any], readable: Mapping[tuple[str, ...], Any]
    ) -> dict[str, Any]:
        """Return the members of a kind; the current ones in place of those that could not be read."""
        found = {}
        for key in self._parts:
            if key[0] == kind and (key in readable or key[1] in current):
                old = current.get(key[1])
                new = readable.get(key, old)
                found[key[1]] = updated(old, new) if kind == "_buffers" else new
        return found


def _value_of(parameter: nn.Parameter) -> tuple[Tensor, bool] | None:
    is_empty = isinstance(parameter, UninitializedParameter)
    return None if is_empty else (parameter.detach(), parameter.requires_grad)


def _put(parameter: nn.Parameter, new: tuple[Tensor, bool]) -> None:
    """Set a parameter, in place if its shape and dtype allow it."""
    value, requires_grad = new
    if isinstance(parameter, UninitializedParameter):
        parameter.materialize(value.shape, dtype=value.dtype)
    if with_contents(parameter, value) is not parameter:
        parameter.data = value  # the stage converted it
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

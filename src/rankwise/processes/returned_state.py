"""`ReturnedState`: the changes that a stage has made in a worker process, for the calling process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.hooks import RemovableHandle

from rankwise.nested import map_tensors, walked
from rankwise.processes.memory_file import (
    Parts,
    Unreadable,
    fingerprint,
    kind_of,
    pickling_error,
    send_by_name,
    sent_by_name,
    set_kind,
)
from rankwise.ranks import warn

_OF_TORCH = frozenset(vars(nn.Module())) | {"_trainer", "_compiled_call_impl"}
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# The calling process has the data already, and its `configure_optimizers` makes optimizers; a handle belongs
# to the hooks of one process.
_STAY_THERE = (Dataset, DataLoader, Sampler, Optimizer, LRScheduler, RemovableHandle)
_KINDS = ("_modules", "_parameters", "_buffers")


@final
class KnownToCaller:
    """The objects of a stage that the calling process also has, and `named`: all that are sent by name."""

    def __init__(self, module: nn.Module, owners: Mapping[str, object], others: Mapping[str, object]) -> None:
        self.module = module
        self.owners = owners  # may be given other attributes by the stage; by the names that warnings have
        self.others = others  # are only sent by name
        by_owner = {f"owner {name}": each for name, each in owners.items()}
        self.named = {**named_parts(module), **others, **by_owner}


@final
class StateBefore:
    """These objects as they are when a stage starts in a worker process."""

    def __init__(self, known: KnownToCaller) -> None:
        self.known = known
        self.parts = named_parts(known.module)
        objects = [*known.module.modules(), *known.owners.values()]
        self.attributes = {id(each): AttributesBefore(each, known.named) for each in objects}  # by the id


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
        modules = {name: part for name, part in before.parts.items() if isinstance(part, nn.Module)}
        submodules = {name: module for name, module in modules.items() if id(module) in present}
        parameters = {name: part for name, part in before.parts.items() if isinstance(part, nn.Parameter)}
        self._values = Parts({name: _value_of(parameter) for name, parameter in parameters.items()})
        self._members = {name: _Members(part) for name, part in submodules.items()}  # has all new submodules
        owners = {**submodules, **known.owners}
        self._attributes = {
            name: ObjectState(owner, before.attributes[id(owner)]) for name, owner in owners.items()
        }
        self._parts = Parts({name: captured(part) for name, part in parts.items()})

    def restore(self, known: KnownToCaller, give: Mapping[str, Callable[[Any], object]]) -> set[str]:
        """Give it to the calling process's objects: weights first; parameters stay the same objects.

        A part that cannot be returned stays as it is, with a warning that names it. `give` restores the other
        parts, by their names. Returns the names of those that could not be returned.
        """
        parts: dict[str, Any] = named_parts(known.module)
        with _NotReturned() as lost:
            for name, value in self._values.items():
                if value is not None:
                    lost.unless(name, value, _put, parts[name])
            for name, members in self._members.items():
                lost.unless(name, members, _Members.give_to, parts[name], name, lost, self._attributes[name])
            for name, owner in known.owners.items():
                lost.unless(f"attributes of {name}", self._attributes[name], ObjectState.give_to, owner)
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

    def __enter__(self) -> _NotReturned:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._reasons:
            warn(
                "These parts of what a worker process has trained cannot be returned to the calling process, "
                f"where they stay as they are: {'; '.join(self._reasons)}.",
            )

    def unless(self, name: str, value: Any, give: Callable[..., object], *to: Any) -> bool:
        """Return whether `give(value, *to)` succeeds; note the name, and why, if it or packing does not."""
        try:
            reason = value.reason if isinstance(value, Unreadable) else None
            if reason is None:
                give(value, *to)
        except Exception as error:  # noqa: BLE001  the user's classes load their own states
            reason = Unreadable.because_of(error).reason
        if reason is not None:
            self._reasons.append(f"{name.strip()} ({reason})")
        return reason is None


@final
class _Members:
    """The parts of one submodule: its class, its submodules, parameters, buffers and some hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = Parts({("class",): kind_of(module)})
        for kind in _KINDS:
            self._parts |= {(kind, name): each for name, each in getattr(module, kind).items()}
        hooks = enumerate(_reparametrizing_hooks(module).values())
        self._parts |= {("hooks", f"hook {number}"): hook for number, hook in hooks}
        self._transient = module._non_persistent_buffers_set
        self._training = module.training

    def give_to(self, module: nn.Module, name: str, lost: _NotReturned, attributes: ObjectState) -> None:
        """Give the module of this name these parts and attributes; buffers stay the same objects."""
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


def _put(new: tuple[Tensor, bool], parameter: nn.Parameter) -> None:
    """Set a parameter, in place if its shape and dtype allow it."""
    value, requires_grad = new
    if isinstance(parameter, UninitializedParameter):
        parameter.materialize(value.shape, dtype=value.dtype)
    if _with_contents(parameter, value) is not parameter:
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


@final
class AttributesBefore:
    """The plain attributes of an object before a stage, to find the ones that the stage changes."""

    def __init__(self, owner: object, named: Mapping[str, object]) -> None:
        self.values = dict(vars(owner))
        with sent_by_name(named):
            self._known = {
                name: _known(value)
                for name, value in self.values.items()
                if name not in _OF_TORCH and not isinstance(value, (*_CONSTANTS, *_STAY_THERE))
            }

    def has_changed(self, name: str, value: Any) -> bool:
        """Return whether an attribute, or something in it, has changed since then."""
        if value is not self.values.get(name, _OF_TORCH):
            return True
        return name in self._known and self._known[name][0] != _known(value)[0]

    def had(self, name: str, item: Any) -> bool:
        """Return whether an attribute that cannot be sent as a whole had an item at that time."""
        return name in self._known and any(each is item for each in self._known[name][1])


def _known(value: Any) -> tuple[object, list[object]]:
    """Return a token that changes when a value does, a digest or ids, and the items in its containers."""
    digest = None if _holds_data(value) else fingerprint(value)
    held = [] if digest else list(walked(value, _items))
    return digest or list(map(id, held)), held


@final
class ObjectState:
    """The attributes of an object that a stage has changed; `before` are the attributes at its start.

    Data, optimizers, schedulers, handles of hooks, and what `__getstate__` leaves out stay in the worker.
    If some items of a dictionary cannot be sent, the others are.
    """

    def __init__(self, owner: object, before: AttributesBefore) -> None:
        state = _state_of(owner)
        self._changed = Parts()
        self._removed = [name for name in before.values if name not in vars(owner)]
        for name, value in vars(owner).items():
            is_kept = name in _OF_TORCH or state.get(name) is not value
            if not is_kept and before.has_changed(name, value):
                sent = _sendable(value, partial(before.had, name))
                if sent is not _KEPT:
                    self._changed[name] = sent

    def give_to(self, owner: object, *, removes: bool = True) -> None:
        """Give an object these attributes; with `removes`, delete the ones that the stage has deleted.

        At the end this raises `Unreadable` for those that could not be packed or read: they stay as they are.
        """
        attributes = vars(owner)
        for name in self._removed if removes else ():
            attributes.pop(name, None)
        for name, value in self._changed.items():
            if not isinstance(value, Unreadable):
                attributes[name] = updated(attributes.get(name), value)
        if lost := [text for name, value in self._changed.items() for text in _unreadable(name, value)]:
            raise Unreadable("; ".join(lost))


def _unreadable(name: str, value: Any) -> Iterator[str]:
    """Yield the name and the reason of each part of an attribute that could not be packed or read."""
    if isinstance(value, Unreadable):
        yield f"{name}: {value.reason}"
    elif isinstance(value, _SomeItems):
        for key, item in value.items.items():
            yield from _unreadable(f"{name}[{key!r}]", item)


_KEPT: Any = object()


def _sendable(value: Any, is_old: Callable[[Any], bool]) -> Any:
    """Return the part of a value to send, `_KEPT`, or an `Unreadable` for a new value that cannot be sent."""
    if isinstance(value, _STAY_THERE):
        return _KEPT
    has_data = _holds_data(value)
    error = None if has_data else pickling_error(value)
    if not has_data and error is None:
        return value
    if (parts := _parts(value)) is None:
        return _KEPT if error is None or is_old(value) else Unreadable.because_of(error)
    items = {key: _sendable(item, is_old) for key, item in parts.items()}
    return _SomeItems([*parts], Parts({key: item for key, item in items.items() if item is not _KEPT}))


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return a dictionary with names as keys, or the fields of a dataclass; None for anything else."""
    if isinstance(value, dict):
        return value if all(isinstance(key, (str, int)) for key in value) else None
    is_data = is_dataclass(value) and not isinstance(value, type)
    return getattr(value, "__dict__", None) if is_data else None


@final
class _SomeItems:
    """The keys of a dictionary, or the fields of a dataclass, and the items that could be sent."""

    def __init__(self, keys: list[Any], items: Parts) -> None:
        self._keys = keys
        self.items = items

    def given_to(self, current: Any) -> Any:
        """Return `current`, or a new dictionary, with these items; items that were not sent stay."""
        parts = _parts(current)
        if parts is None:
            parts = current = {}
        sent = {key: item for key, item in self.items.items() if not isinstance(item, Unreadable)}
        new = {key: updated(parts.get(key), item) for key, item in sent.items()}
        merged = {key: new.get(key, parts.get(key)) for key in self._keys if key in new or key in parts}
        parts.clear()
        parts.update(merged)
        return current


def _state_of(owner: Any) -> dict[str, Any]:
    """Return the attributes with which an object is pickled; none if that fails."""
    if isinstance(owner, nn.Module) and parametrize.is_parametrized(owner):  # its method only raises
        return vars(owner)
    try:
        state = getattr(type(owner), "__getstate__", vars)(owner)  # Python 3.10's object has none
    except Exception:  # noqa: BLE001  pickling runs the user's code
        return {}
    return state if isinstance(state, dict) else {}


def _holds_data(value: Any) -> bool:
    """Return whether a value, or an item of it, stays in the worker."""
    return any(isinstance(item, _STAY_THERE) for item in walked(value, _items))


def _items(value: Any) -> Iterable[Any] | None:
    parts = value if isinstance(value, (list, tuple, set, dict)) else _parts(value)
    return parts.values() if isinstance(parts, dict) else parts


def updated(current: Any, value: Any) -> Any:
    """Return `current` with the contents of `value`, if it can be changed in place; otherwise `value`."""
    if isinstance(value, _SomeItems):
        return value.given_to(current)
    if type(current) is not type(value):
        return value
    if type(value) is list:
        current[:] = value
    elif type(value) in (dict, set):
        current.clear()
        current.update(value)
    elif type(value) is Tensor:
        return _with_contents(current, value)
    else:
        return value
    return current


def _with_contents(current: Tensor, value: Tensor) -> Tensor:
    """Return `current` with the contents of `value`, if it can be changed in place; otherwise `value`."""
    if (current.shape, current.dtype) != (value.shape, value.dtype):
        return value
    try:
        with torch.no_grad():
            return current.copy_(value)
    except RuntimeError:  # an expanded tensor, or one of inference mode
        return value

"""Communication hooks by name, their options, and the state that they keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.errors import DuplicateNameError, InvalidTypeError, UnknownArgumentError, UnknownNameError

__all__ = [
    "CommHookRegistry",
    "Hook",
    "HookPlace",
    "NamedHook",
    "check_hook",
    "read_state",
    "state_for_rank",
    "write_state",
]

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


@final
@dataclass(frozen=True)
class HookPlace:
    """Where a hook's state is made.

    Attributes:
        process_group: the ranks over which gradients are averaged; None for all of them.
        local_world_size: how many of them are on this node.
    """

    process_group: dist.ProcessGroup | None
    local_world_size: int


@final
@dataclass(frozen=True)
class NamedHook:
    """A hook that has a name.

    Attributes:
        hook: `hook(state, bucket)`, as DDP takes it.
        make_state: `make_state(place, **options)`, called on every rank; where it is None, `state` is the
            process group and there are no options.
        check: `check(**options)`, called in the strategy's constructor; raises for what cannot work.
        description: one line.
        averages: whether all ranks have the same gradients after it.
    """

    hook: Hook
    make_state: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    description: str = ""
    averages: bool = False

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Make sure that the options are what the state takes.

        Raises:
            UnknownArgumentError: for one that it does not take.
        """
        known = self._options()
        for option in options:
            if known is not None and option not in known:
                raise UnknownArgumentError(target=f"comm_hook {name!r}", name=option, known=known)
        if self.check is not None:
            self.check(**options)

    def _options(self) -> tuple[str, ...] | None:
        """Return the names of the options; None where any will do."""
        if self.make_state is None:
            return ()
        parameters = list(inspect.signature(self.make_state).parameters.values())[1:]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return tuple(parameter.name for parameter in parameters)


@final
class _Registry:
    """Names, in any case, and the hooks that they stand for."""

    def __init__(self) -> None:
        self._entries: dict[str, NamedHook] = {}

    def register(
        self,
        name: Any,
        hook: Hook,
        make_state: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        check: Callable[..., None] | None = None,
        averages: bool = False,
    ) -> None:
        """Give a communication hook a name, for `DDPStrategy(comm_hook="name:option=value")`.

        Args:
            name: case does not matter.
            hook: `hook(state, bucket)`, as DDP takes it.
            make_state: `make_state(place, **options)` with a `HookPlace`, called on every rank. Without it
                the hook is given the process group.
            description: one line.
            override: whether the name may be taken already.
            check: `check(**options)`, called in the strategy's constructor.
            averages: whether all ranks have the same gradients after it. Where they may not, decisions on
                gradients (about steps with infinite ones, say) cost a collective.

        Raises:
            InvalidTypeError: when the name is no string, or the hook cannot be called with a bucket.
            DuplicateNameError: when the name is taken.
        """
        if not name or not isinstance(name, str):
            raise InvalidTypeError(argument="name", value=name, expected="a string that is not empty")
        if name.lower() in self._entries and not override:
            raise DuplicateNameError(name=name.lower(), kind="Hook", registry="CommHookRegistry")
        self._entries[name.lower()] = NamedHook(check_hook(hook), make_state, check, description, averages)

    def get(self, name: str) -> NamedHook:
        """Return the hook of that name.

        Raises:
            InvalidTypeError: when the name is no string.
            UnknownNameError: when it is not registered.
        """
        if not isinstance(name, str):
            raise InvalidTypeError(argument="comm_hook", value=name, expected="a name")
        if name.lower() not in self._entries:
            raise UnknownNameError(
                kind="comm_hook",
                name=name,
                known=tuple(self),
                remedy=f'use one of the names above, or CommHookRegistry.register("{name}", ...).',
            )
        return self._entries[name.lower()]

    def remove(self, name: str) -> None:
        """Forget a name.

        Raises:
            UnknownNameError: when it is not registered.
        """
        self.get(name)
        del self._entries[name.lower()]

    def describe(self, name: str) -> str:
        """Return the description of a name.

        Raises:
            UnknownNameError: when it is not registered.
        """
        return self.get(name).description

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __repr__(self) -> str:
        return f"CommHookRegistry({', '.join(self)})"


def check_hook(hook: object) -> Hook:
    """Return what DDP can call with a state and a bucket.

    Raises:
        InvalidTypeError: for anything else.
    """
    if callable(hook) and not isinstance(hook, type):
        try:
            inspect.signature(hook).bind(None, None)
        except TypeError:
            pass
        except ValueError:  # no signature is known, as of things written in C
            return hook
        else:
            return hook
    raise InvalidTypeError(
        argument="comm_hook",
        value=hook,
        expected="a name, or a function of two arguments: a state and a torch.distributed.GradBucket",
        remedy="def my_hook(state, bucket): return a torch.futures.Future of bucket.buffer(), averaged.",
    )


CommHookRegistry = _Registry()


def read_state(state: Any) -> dict[str, Any]:
    """Return what a hook's state must keep, as plain types and tensors; {} for what keeps nothing.

    A state of the user's own is asked for its `state_dict()`, if it has one.
    """
    if callable(own := getattr(state, "state_dict", None)):
        return dict(own())
    if _counts_steps(state):
        return {"iter": state.iter}
    return {}


def write_state(state: Any, saved: Mapping[str, Any]) -> None:
    """Give a hook's state back what `read_state` returned."""
    if not saved:
        return
    if callable(own := getattr(state, "load_state_dict", None)):
        own(saved)
    elif _counts_steps(state):
        state.iter = saved["iter"]


def _counts_steps(state: Any) -> bool:
    """Return whether this is torch's `PostLocalSGDState`, or one made like it."""
    return isinstance(getattr(state, "iter", None), int)


def state_for_rank(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return one rank's part of what all ranks have saved.

    In a world of another size every rank gets the mean of the errors that the ranks had: what they have not
    sent yet stays the same when it is averaged.
    """
    if len(saved) == world_size:
        return dict(saved[rank])
    first = dict(saved[0])
    if errors := first.get("errors"):
        others = [state["errors"] for state in saved]
        first["errors"] = {name: _mean([other.get(name) for other in others]) for name in errors}
    return first


def _mean(parts: Sequence[Tensor | None]) -> Tensor:
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(dim=0) / len(parts)

"""`CommHookRegistry`: communication hooks by name, with their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from rankwise.errors import InvalidTypeError, UnknownArgumentError, UnknownNameError
from rankwise.named_options import NameTable

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


@final
@dataclass(frozen=True)
class HookPlace:
    """The ranks for which a hook's state is created.

    Attributes:
        process_group: the ranks over which gradients are averaged; None for all ranks.
        local_world_size: how many of them are on this node.
    """

    process_group: dist.ProcessGroup | None
    local_world_size: int


@final
@dataclass(frozen=True)
class NamedHook:
    """A registered hook; `CommHookRegistry.register` documents its fields."""

    hook: Hook
    make_state: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    description: str = ""
    averages: bool = False

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise for options that `make_state` does not take, or `check` refuses."""
        parameters = (
            [] if self.make_state is None else list(inspect.signature(self.make_state).parameters.values())
        )
        known = tuple(parameter.name for parameter in parameters[1:])
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            for option in options:
                if option not in known:
                    raise UnknownArgumentError(target=f"comm_hook {name!r}", name=option, known=known)
        if self.check is not None:
            self.check(**options)


@final
class _Registry(NameTable[NamedHook]):
    """Maps names, in any case, to communication hooks."""

    kind = "Hook"
    title = "CommHookRegistry"
    argument = "comm_hook"

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
        """Register a communication hook, for `DDPStrategy(comm_hook="name:option=value")`.

        Args:
            name: case does not matter.
            hook: `hook(state, bucket)`, as DDP calls it.
            make_state: `make_state(place, **options)` with a `HookPlace`, called on every rank. Without it
                the state is the process group.
            description: one line.
            override: whether to replace a hook of that name.
            check: `check(**options)`, called in the strategy's constructor.
            averages: whether all ranks have the same gradients after it. Otherwise a check of the
                gradients, such as for infinite ones, costs a collective.

        Raises:
            InvalidTypeError: when the name is not a string, or the hook does not take a state and a bucket.
            DuplicateNameError: when the name is taken.
        """
        key = self._check_name(name, override)
        self._entries[key] = NamedHook(check_hook(hook), make_state, check, description, averages)

    def _find_unregistered(self, name: str) -> NamedHook:
        raise UnknownNameError(
            kind="comm_hook",
            name=name,
            known=tuple(self),
            remedy=f'use one of the names above, or CommHookRegistry.register("{name}", ...).',
        )

    get = NameTable[NamedHook].entry


def check_hook(hook: object) -> Hook:
    """Return the hook if it can be called with a state and a bucket, or raise."""
    if callable(hook) and not isinstance(hook, type):
        try:
            inspect.signature(hook).bind(None, None)
        except TypeError:
            pass
        except ValueError:  # a function written in C may have no signature
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

"""`CommHook`: the communication hook that was asked for, checked; and the one that a wrapped model has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError
from rankwise.gradient_sync.built_in_hooks import Compressing, allreduce_hook
from rankwise.gradient_sync.comm_hooks import (
    CommHookRegistry,
    Hook,
    HookPlace,
    NamedHook,
    check_hook,
)
from rankwise.gradient_sync.powersgd import PowerSGDMemory, powersgd_hook
from rankwise.gradient_sync.weights import WeightedReduction
from rankwise.named_options import split_options

__all__ = ["CommHook", "register_ddp_comm_hook"]

Wrapper = Callable[[Hook], Hook]

_WRAPPERS = {
    "fp16": torch.float16,
    "fp16_compress": torch.float16,
    "fp16_compress_wrapper": torch.float16,
    "bf16": torch.bfloat16,
    "bf16_compress": torch.bfloat16,
    "bf16_compress_wrapper": torch.bfloat16,
}


@final
@dataclass
class CommHook:
    """A communication hook, its options, state and wrapper; makes the state on each rank.

    Attributes:
        name: what it is called.
        named: the hook.
        options: for its state.
        state: the user's own state; `make_state` decides where it is None.
        wrapper: what is put around the hook, or None.
    """

    name: str
    named: NamedHook
    options: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    wrapper: Wrapper | None = None

    @classmethod
    def checked(cls, hook: object, state: Any = None, wrapper: object = None) -> CommHook | None:
        """Return what `comm_hook=`, `comm_state=` and `comm_wrapper=` ask for; None for no hook.

        Raises:
            UnknownNameError, UnknownArgumentError, InvalidArgumentError, InvalidTypeError,
            ConfigurationError: for what cannot work.
        """
        if hook is None:
            if state is not None or wrapper is not None:
                given = "comm_state" if state is not None else "comm_wrapper"
                raise ConfigurationError(
                    message=f"{given} is given without a comm_hook.", remedy='pass comm_hook="..." too.'
                )
            return None
        around = _check_wrapper(wrapper)
        if not isinstance(hook, str):
            function = _known(check_hook(hook))
            return cls(_name_of(hook), NamedHook(function, averages=_averages(function)), {}, state, around)
        name, options = split_options("comm_hook", hook)
        named = CommHookRegistry.get(name)
        if state is not None and options:
            raise ConfigurationError(
                message=f"comm_hook={hook!r} has options, and there is a comm_state too.",
                remedy="give the options to the state, or leave the state to the hook.",
            )
        if state is None:
            named.check_options(name, options)
        return cls(name.lower(), named, options, state, around)

    @property
    def is_local_sgd(self) -> bool:
        """Whether models drift apart under this hook, so that they must be averaged."""
        return self.name in ("post_localsgd", "post_localsgd_hook")

    @property
    def remembers(self) -> bool:
        """Whether the hook keeps gradients, or models, from step to step."""
        return self.is_local_sgd or "powersgd" in self.name.lower()

    @property
    def first_local_step(self) -> int:
        """Under post-local SGD, after how many steps gradients are no longer averaged over all ranks."""
        given = getattr(self.state, "start_localSGD_iter", None)
        return int(self.options.get("start_localSGD_iter", 100) if given is None else given)

    def attach(self, wrapped: DistributedDataParallel, place: HookPlace) -> Any:
        """Register the hook with a wrapped model; return its state."""
        state = self._state_for(place)
        if isinstance(state, PowerSGDMemory):
            state.name_parameters(wrapped.module)
        averages = self.named.averages and (self.wrapper is None or isinstance(self.wrapper, _Casting))
        _register(wrapped, state, self.function, averages)
        return state

    @property
    def function(self) -> Hook:
        """What DDP calls: the hook within its wrapper."""
        return self.named.hook if self.wrapper is None else self.wrapper(self.named.hook)

    @property
    def is_plain(self) -> bool:
        """Whether buckets are averaged and no more, in full."""
        return self.wrapper is None and self.named.hook is allreduce_hook

    @property
    def is_linear(self) -> bool:
        """Whether what it makes of a sum of gradients times weights, divided by weights, is their average."""
        is_average = self.named.hook is allreduce_hook or isinstance(self.named.hook, Compressing)
        return is_average and (self.wrapper is None or isinstance(self.wrapper, _Casting))

    def _state_for(self, place: HookPlace) -> Any:
        if self.state is not None:
            is_powersgd = self.named.hook is powersgd_hook and not isinstance(self.state, PowerSGDMemory)
            return PowerSGDMemory(self.state) if is_powersgd else self.state
        if self.named.make_state is not None:
            return self.named.make_state(place, **self.options)
        return place.process_group

    # ------------------------------------------------------------------ travelling

    def __getstate__(self) -> dict[str, Any]:
        """Travel with a state of torch's taken apart: it asks for a process group when it is unpickled."""
        return {**self.__dict__, "state": _Packed.of(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.state, _Packed):
            self.state = self.state.unpacked()


def register_ddp_comm_hook(
    model: nn.Module, state: Any = None, hook: Hook | str | None = None, wrapper: Wrapper | str | None = None
) -> None:
    """Have DDP reduce gradients by a communication hook; the model's weights stay as they are.

    Runs on: every rank, before the first backward pass. How many ranks are on this node is what
    `LOCAL_WORLD_SIZE` says, as launchers set it; without it, all of them.

    Args:
        model: a `DistributedDataParallel`.
        state: what the hook is given; None lets a named hook make it.
        hook: a name with options, such as `"powersgd:matrix_approximation_rank=2"`, or a function
            `hook(state, bucket)`. None registers nothing.
        wrapper: `"fp16"`, `"bf16"`, or a function from a hook to a hook.

    Raises:
        InvalidTypeError: when the model is not wrapped.
        UnknownNameError, UnknownArgumentError, InvalidArgumentError, ConfigurationError: for a hook that
            cannot work.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InvalidTypeError(
            argument="model",
            value=type(model).__name__,
            expected="a DistributedDataParallel",
            remedy="module = strategy.setup_module(module)",
        )
    found = CommHook.checked(hook, state, wrapper)
    if found is not None:
        size = model.process_group.size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        found.attach(model, HookPlace(model.process_group, min(local, size)))


def _register(wrapped: DistributedDataParallel, state: Any, hook: Hook, averages: bool) -> None:
    def run(state: Any, bucket: Any) -> Any:  # torch reads its name and annotations, and asks for `bucket`
        return hook(state, bucket)

    run.__annotations__.clear()
    run.__dict__["averages"] = averages
    run.__qualname__ = _name_of(hook)
    wrapped.register_comm_hook(state, run)


def _known(hook: Hook) -> Hook:
    """Return our own version of a hook of torch's that remembers things by bucket."""
    is_powersgd = getattr(hook, "__name__", "") == "powerSGD_hook" and hook.__module__.startswith("torch.")
    return powersgd_hook if is_powersgd else hook


def _averages(hook: Hook) -> bool:
    """Return whether a hook given as a function is known to give all ranks the same gradients."""
    is_wrapper = "<locals>" in getattr(hook, "__qualname__", "")  # around another hook, which may be anything
    is_torchs = getattr(hook, "__module__", "").endswith("ddp_comm_hooks.default_hooks") and not is_wrapper
    return is_torchs or isinstance(hook, WeightedReduction) or hook is powersgd_hook


def _name_of(hook: object) -> str:
    name = str(getattr(hook, "__name__", type(hook).__name__))
    return name.lower() if "localSGD" in name else name


def _check_wrapper(wrapper: object) -> Wrapper | None:
    if wrapper is None:
        return None
    if isinstance(wrapper, str):
        if wrapper.lower() not in _WRAPPERS:
            raise UnknownNameError(kind="comm_wrapper", name=wrapper, known=tuple(_WRAPPERS))
        return _Casting(_WRAPPERS[wrapper.lower()])
    if not callable(wrapper):
        raise InvalidTypeError(
            argument="comm_wrapper", value=wrapper, expected="a name, or a function from a hook to a hook"
        )
    return wrapper


@final
@dataclass(frozen=True)
class _Casting:
    """Put a cast to another dtype, and back, around a hook."""

    dtype: torch.dtype

    def __call__(self, hook: Hook) -> Hook:
        def casting_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            original = bucket.buffer()
            bucket.set_buffer(original.to(self.dtype))
            reduced = hook(state, bucket)
            return reduced.then(lambda done: original.copy_(done.value()))

        return casting_hook


@final
@dataclass(frozen=True)
class _Packed:
    """A state of torch's hooks as its class and its slots, without its process groups."""

    kind: type
    slots: dict[str, Any]

    @classmethod
    def of(cls, state: Any) -> Any:
        kind = type(state)
        if not kind.__module__.startswith("torch.distributed.algorithms.") or "__slots__" not in vars(kind):
            return state
        names = [name for name in kind.__slots__ if name not in ("process_group", "subgroup")]
        return cls(kind, {name: getattr(state, name) for name in names})

    def unpacked(self) -> Any:
        kind: Any = self.kind
        state = kind.__new__(kind)
        for name in kind.__slots__:
            object.__setattr__(state, name, self.slots.get(name))
        return state

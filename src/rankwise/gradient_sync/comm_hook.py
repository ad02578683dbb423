"""`CommHook`: a validated communication hook, which is registered with DDP; and the states of hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.checks import check_callable, check_name
from rankwise.environments import TorchElasticEnvironment
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.gradient_sync.hook_registry import (
    CastHook,
    CommHookFunction,
    CommHookRegistry,
    HookPlace,
    NamedHook,
    PowerSGDMemory,
    allreduce_hook,
    check_comm_hook,
    powersgd_hook,
)
from rankwise.named_options import split_options

Wrapper = Callable[[CommHookFunction], CommHookFunction]

_WRAPPERS = {
    f"{name}{suffix}": dtype
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    for suffix in ("", "_compress", "_compress_wrapper")
}
_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_TORCH_AVERAGING = (f"{_TORCH_HOOKS}default_hooks", f"{_TORCH_HOOKS}powerSGD_hook")
_STATEFUL = ("PowerSGDMemory", "PowerSGDState", "PostLocalSGDState")


@final
@dataclass
class CommHook:
    """A communication hook with its options, state and wrapper; creates the state on each rank."""

    name: str
    named: NamedHook
    options: dict[str, Any]  # of `named.make_state`
    state: Any  # the user's own; None: `named.make_state` creates it
    wrapper: Wrapper | None

    @classmethod
    def checked(cls, hook: object, state: Any = None, wrapper: object = None) -> CommHook | None:
        """Validate `comm_hook=`, `comm_state=` and `comm_wrapper=`; return the hook, None for no hook."""
        if hook is None:
            if state is not None or wrapper is not None:
                given = "comm_state" if state is not None else "comm_wrapper"
                raise ConfigurationError(
                    message=f"{given} is given without a comm_hook.", remedy='pass comm_hook="..." too.'
                )
            return None
        wrap = _check_wrapper(wrapper)
        if not isinstance(hook, str):
            function = check_comm_hook(hook)
            _refuse_batched_powersgd(function)
            # torch's PowerSGD hook keeps its errors by bucket, which DDP changes; rankwise's replaces it.
            is_powersgd = _name_of(hook) == "powerSGD_hook" and function.__module__.startswith("torch.")
            named = NamedHook(powersgd_hook if is_powersgd else function, averages=is_averaging(function))
            return cls(_name_of(hook), named, {}, state, wrap)
        name, options = split_options("comm_hook", hook)
        named = CommHookRegistry.get(name)
        if state is not None and options:
            raise ConfigurationError(
                message=f"comm_hook={hook!r} has options, and there is a comm_state too.",
                remedy="give the options to the state, or leave the state to the hook.",
            )
        if state is None:
            named.check_options(name, options)
        return cls(name.lower(), named, options, state, wrap)

    @property
    def is_local_sgd(self) -> bool:
        """Whether models differ between ranks under this hook, so that they must be averaged."""
        return self.name in ("post_localsgd", "post_localsgd_hook")

    @property
    def is_noop(self) -> bool:
        """Whether the hook averages nothing, on purpose."""
        return self.name in ("noop", "noop_hook")

    @property
    def is_powersgd(self) -> bool:
        """Whether the hook is torch's PowerSGD."""
        return self.named.hook is powersgd_hook

    @property
    def is_stateful(self) -> bool:
        """Whether the hook keeps gradients or models from step to step."""
        return self.is_local_sgd or "powersgd" in self.name.lower()

    @property
    def function(self) -> CommHookFunction:
        """The hook within its wrapper."""
        return self.named.hook if self.wrapper is None else self.wrapper(self.named.hook)

    @property
    def is_plain(self) -> bool:
        """Whether the hook averages buckets in full precision and does nothing else."""
        return self.wrapper is None and self.named.hook is allreduce_hook

    @property
    def is_linear(self) -> bool:
        """Whether the hook can average sums of weighted gradients, which are divided by the weights later."""
        hook = self.named.hook
        average = hook.hook if isinstance(hook, CastHook) else hook
        return average is allreduce_hook and self._is_wrapper_linear

    @property
    def _is_wrapper_linear(self) -> bool:
        return self.wrapper is None or getattr(self.wrapper, "func", None) is CastHook

    def attach(self, wrapped: DistributedDataParallel, place: HookPlace) -> Any:
        """Register the hook with a wrapped module; return its state."""
        own = self.state
        if own is None:
            make_state = self.named.make_state
            own = place.process_group if make_state is None else make_state(place, **self.options)
        elif self.named.hook is powersgd_hook and not isinstance(own, PowerSGDMemory):
            own = PowerSGDMemory(own)
        if isinstance(own, PowerSGDMemory):
            own.name_parameters(wrapped.module)
        hook = self.function

        def run(state: Any, bucket: Any) -> Any:  # torch checks its annotations and the name `bucket`
            return hook(state, bucket)

        run.__annotations__.clear()
        run.__dict__["averages"] = self.named.averages and self._is_wrapper_linear
        run.__qualname__ = _name_of(hook)
        wrapped.register_comm_hook(own, run)
        return own

    def __getstate__(self) -> dict[str, Any]:
        """Replace a state of torch's, whose unpickling requires a process group, by its class and slots."""
        kind = type(self.state)
        if not kind.__module__.startswith("torch.distributed.algorithms.") or "__slots__" not in vars(kind):
            return self.__dict__
        groups = ("process_group", "subgroup")
        slots = {name: None if name in groups else getattr(self.state, name) for name in kind.__slots__}
        return {**self.__dict__, "state": None, "_torch_state": (kind, slots)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, slots = state.pop("_torch_state", (None, {}))
        self.__dict__.update(state)
        if kind is not None:
            self.state = kind.__new__(kind)
            for name, value in slots.items():
                object.__setattr__(self.state, name, value)


def _refuse_batched_powersgd(hook: CommHookFunction) -> None:
    if _name_of(hook) == "batched_powerSGD_hook" and hook.__module__.startswith(_TORCH_HOOKS):
        raise ConfigurationError(
            message="torch's batched_powerSGD_hook cannot be used.",
            facts="it fails in its own code when it begins to compress, after start_powerSGD_iter steps.",
            remedy='comm_hook="powersgd:batch_tensors_with_same_shape=true".',
        )


def _check_wrapper(wrapper: Any) -> Wrapper | None:
    if wrapper is None:
        return None
    if isinstance(wrapper, str):
        return partial(CastHook, _WRAPPERS[check_name("comm_wrapper", wrapper, tuple(_WRAPPERS))])
    check_callable("comm_wrapper", wrapper, "a name, or a function from a hook to a hook")
    given: Wrapper = wrapper
    return given


def register_ddp_comm_hook(
    model: nn.Module,
    state: Any = None,
    hook: CommHookFunction | str | None = None,
    wrapper: Wrapper | str | None = None,
    *,
    ddp_comm_state: Any = None,
    ddp_comm_hook: Any = None,
    ddp_comm_wrapper: Any = None,
) -> None:
    """Make DDP average gradients with a communication hook.

    Runs on: every rank, before the first backward pass. The environment variable `LOCAL_WORLD_SIZE`, which
    launchers set, gives the number of ranks on this node; without it all ranks count as on one node.

    Args:
        model: a `DistributedDataParallel`.
        state: the hook's state; None lets a named hook create it.
        hook: a name with options, such as `"powersgd:matrix_approximation_rank=2"`, or a function
            `hook(state, bucket)`. None registers nothing.
        wrapper: `"fp16"`, `"bf16"`, or a function from a hook to a hook.
        ddp_comm_state: Lightning's name for `state`.
        ddp_comm_hook: Lightning's name for `hook`.
        ddp_comm_wrapper: Lightning's name for `wrapper`.

    Raises:
        InvalidTypeError: when the model is not wrapped.
        ConfigurationError: when an argument is given by both names.
        UnknownNameError, UnknownArgumentError, InvalidArgumentError, ConfigurationError: for invalid
            arguments.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InvalidTypeError(
            argument="model",
            value=type(model).__name__,
            expected="a DistributedDataParallel",
            remedy="module = strategy.setup_module(module)",
        )
    names: list[Any] = [(state, ddp_comm_state), (hook, ddp_comm_hook), (wrapper, ddp_comm_wrapper)]
    if any(own is not None and other is not None for own, other in names):
        raise ConfigurationError(
            message="register_ddp_comm_hook() got one argument by two names.",
            facts="ddp_comm_state, ddp_comm_hook and ddp_comm_wrapper are state, hook and wrapper.",
            remedy="leave out one of the two.",
        )
    state, hook, wrapper = (own if other is None else other for own, other in names)
    found = CommHook.checked(hook, state, wrapper)
    if found is not None:
        size = model.process_group.size()
        local = TorchElasticEnvironment().local_world_size if os.environ.get("LOCAL_WORLD_SIZE") else size
        found.attach(model, HookPlace(model.process_group, min(max(1, local), size)))


def is_averaging(hook: Any) -> bool:
    """Return whether a hook is known to give all ranks the same gradients."""
    if getattr(hook, "averages", False):
        return True
    is_wrapper = "<locals>" in getattr(hook, "__qualname__", "")  # it may wrap any hook
    return getattr(hook, "__module__", "") in _TORCH_AVERAGING and not is_wrapper


def _name_of(hook: object) -> str:
    name = str(getattr(hook, "__name__", type(hook).__name__))
    return name.lower() if "localSGD" in name else name


def hook_of(wrapped: nn.Module) -> Callable[[Any], Any] | None:
    """Return the hook of a wrapped module, for buckets that DDP has not made; None for DDP's own average.

    Raises:
        ConfigurationError: for a hook that keeps gradients from step to step.
    """
    if not isinstance(wrapped, DistributedDataParallel) or not wrapped._comm_hooks:
        return None
    last: Any = wrapped._comm_hooks[-1]
    hook, state = last
    if type(state).__name__ in _STATEFUL:
        raise ConfigurationError(
            message=f"A hook with a {type(state).__name__} cannot be used in manual optimisation.",
            facts="it keeps gradients from step to step, and there a step may have any number of "
            "backward passes, each over other parameters.",
            remedy='comm_hook="bf16_compress", or automatic_optimization = True.',
        )
    return partial(hook, state)


def read_state(state: Any) -> dict[str, Any]:
    """Return the part of a hook's state for a checkpoint; a user's state may have a method `state_dict()`."""
    if callable(own := getattr(state, "state_dict", None)):
        return dict(own())
    return {"iter": state.iter} if isinstance(getattr(state, "iter", None), int) else {}  # torch's local SGD


def write_state(state: Any, saved: Mapping[str, Any]) -> None:
    """Restore what `read_state` returned, if anything."""
    if not saved:
        return
    if callable(own := getattr(state, "load_state_dict", None)):
        own(saved)
    elif "iter" in saved and isinstance(getattr(state, "iter", None), int):
        state.iter = saved["iter"]


def state_for_rank(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return one rank's part of the states that all ranks have saved.

    On another number of ranks each one gets the mean of all errors, so that the average of what has not been
    sent yet stays the same.
    """
    if len(saved) == world_size:
        return dict(saved[rank])
    state = dict(saved[0])
    if errors := state.get("errors"):
        by_name = {name: [own["errors"][name] for own in saved if name in own["errors"]] for name in errors}
        state["errors"] = {name: torch.stack(each).sum(dim=0) / len(saved) for name, each in by_name.items()}
    return state

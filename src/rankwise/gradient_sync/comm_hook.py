"""`CommHook`: a validated communication hook, registered with DDP or run without it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError
from rankwise.gradient_sync.buckets import (
    BUCKET_BYTES,
    buckets_of,
    concatenated_gradients,
    require_dense,
    write_means,
)
from rankwise.gradient_sync.built_in_hooks import (
    CompressHook,
    PowerSGDMemory,
    allreduce_hook,
    powersgd_hook,
)
from rankwise.gradient_sync.hook_registry import CommHookRegistry, Hook, HookPlace, NamedHook, check_hook
from rankwise.gradient_sync.weights import WeightedReduction
from rankwise.named_options import split_options

Wrapper = Callable[[Hook], Hook]

_WRAPPERS = {
    "fp16": torch.float16,
    "fp16_compress": torch.float16,
    "fp16_compress_wrapper": torch.float16,
    "bf16": torch.bfloat16,
    "bf16_compress": torch.bfloat16,
    "bf16_compress_wrapper": torch.bfloat16,
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
            function = _replaced(check_hook(hook))
            return cls(_name_of(hook), NamedHook(function, averages=is_averaging(function)), {}, state, wrap)
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
    def is_stateful(self) -> bool:
        """Whether the hook keeps gradients or models from step to step."""
        return self.is_local_sgd or "powersgd" in self.name.lower()

    @property
    def first_local_step(self) -> int:
        """The number of steps after which post-local SGD stops averaging gradients over all ranks."""
        given = getattr(self.state, "start_localSGD_iter", None)
        return int(self.options.get("start_localSGD_iter", 100) if given is None else given)

    @property
    def function(self) -> Hook:
        """The hook within its wrapper."""
        return self.named.hook if self.wrapper is None else self.wrapper(self.named.hook)

    @property
    def is_plain(self) -> bool:
        """Whether the hook averages buckets in full precision and does nothing else."""
        return self.wrapper is None and self.named.hook is allreduce_hook

    @property
    def is_linear(self) -> bool:
        """Whether the hook can average sums of weighted gradients, which are divided by the weights later."""
        is_average = self.named.hook is allreduce_hook or isinstance(self.named.hook, CompressHook)
        return is_average and self._is_wrapper_linear

    @property
    def _is_wrapper_linear(self) -> bool:
        return self.wrapper is None or isinstance(self.wrapper, _CastWrapper)

    def attach(self, wrapped: DistributedDataParallel, place: HookPlace) -> Any:
        """Register the hook with a wrapped module; return its state."""
        state = self._state_for(place)
        if isinstance(state, PowerSGDMemory):
            state.name_parameters(wrapped.module)
        _register(wrapped, state, self.function, self.named.averages and self._is_wrapper_linear)
        return state

    def _state_for(self, place: HookPlace) -> Any:
        if self.state is not None:
            is_powersgd = self.named.hook is powersgd_hook and not isinstance(self.state, PowerSGDMemory)
            return PowerSGDMemory(self.state) if is_powersgd else self.state
        if self.named.make_state is not None:
            return self.named.make_state(place, **self.options)
        return place.process_group

    def __getstate__(self) -> dict[str, Any]:
        """Replace a state of torch's, whose unpickling requires a process group."""
        return {**self.__dict__, "state": _PickledState.of(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.state, _PickledState):
            self.state = self.state.restored()


@final
@dataclass(frozen=True)
class _PickledState:
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

    def restored(self) -> Any:
        kind: Any = self.kind
        state = kind.__new__(kind)
        for name in kind.__slots__:
            object.__setattr__(state, name, self.slots.get(name))
        return state


@final
@dataclass(frozen=True)
class _CastWrapper:
    """Wraps a hook so that it gets the bucket in another dtype."""

    dtype: torch.dtype

    def __call__(self, hook: Hook) -> Hook:
        def casting_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            original = bucket.buffer()
            bucket.set_buffer(original.to(self.dtype))
            reduced = hook(state, bucket)
            return reduced.then(lambda done: original.copy_(done.value()))

        return casting_hook


def _check_wrapper(wrapper: object) -> Wrapper | None:
    if wrapper is None:
        return None
    if isinstance(wrapper, str):
        if wrapper.lower() not in _WRAPPERS:
            raise UnknownNameError(kind="comm_wrapper", name=wrapper, known=tuple(_WRAPPERS))
        return _CastWrapper(_WRAPPERS[wrapper.lower()])
    if not callable(wrapper):
        raise InvalidTypeError(
            argument="comm_wrapper", value=wrapper, expected="a name, or a function from a hook to a hook"
        )
    return wrapper


def register_ddp_comm_hook(
    model: nn.Module, state: Any = None, hook: Hook | str | None = None, wrapper: Wrapper | str | None = None
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

    Raises:
        InvalidTypeError: when the model is not wrapped.
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
    found = CommHook.checked(hook, state, wrapper)
    if found is not None:
        size = model.process_group.size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        found.attach(model, HookPlace(model.process_group, min(local, size)))


def _register(wrapped: DistributedDataParallel, state: Any, hook: Hook, averages: bool) -> None:
    def run(state: Any, bucket: Any) -> Any:  # torch checks its annotations and the name `bucket`
        return hook(state, bucket)

    run.__annotations__.clear()
    run.__dict__.update(averages=averages, hook=hook)
    run.__qualname__ = _name_of(hook)
    wrapped.register_comm_hook(state, run)


def is_averaging(hook: Any) -> bool:
    """Return whether a hook is known to give all ranks the same gradients."""
    if getattr(hook, "averages", False) or isinstance(hook, WeightedReduction) or hook is powersgd_hook:
        return True
    is_wrapper = "<locals>" in getattr(hook, "__qualname__", "")  # it may wrap any hook
    return getattr(hook, "__module__", "") in _TORCH_AVERAGING and not is_wrapper


def _replaced(hook: Hook) -> Hook:
    """Return rankwise's own version of torch's PowerSGD hook, which stores its memory by bucket."""
    is_powersgd = getattr(hook, "__name__", "") == "powerSGD_hook" and hook.__module__.startswith("torch.")
    return powersgd_hook if is_powersgd else hook


def _name_of(hook: object) -> str:
    name = str(getattr(hook, "__name__", type(hook).__name__))
    return name.lower() if "localSGD" in name else name


@final
class HookBucket:
    """The gradients of some parameters in one tensor, with the methods of torch's `GradBucket`."""

    def __init__(self, parameters: list[Tensor], index: int, is_last: bool) -> None:
        self._parameters = parameters
        self._index = index
        self._is_last = is_last
        self._buffer = concatenated_gradients(parameters)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        views = _unflatten_dense_tensors(self._buffer, self._parameters)
        return [view.view(like.shape) for view, like in zip(views, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._parameters


@final
@dataclass
class ManualHookRunner:
    """Runs the communication hook of a wrapped module on buckets that DDP has not made."""

    hook: Hook
    state: Any

    @classmethod
    def of(cls, wrapped: nn.Module) -> ManualHookRunner | None:
        """Return a runner of the hook that was registered with a wrapped module; None for DDP's own average.

        Raises:
            ConfigurationError: for a hook that keeps gradients from step to step.
        """
        hooks: list[Any] = wrapped._comm_hooks if isinstance(wrapped, DistributedDataParallel) else []
        if not hooks or isinstance(getattr(hooks[-1][0], "hook", None), WeightedReduction):
            return None
        hook, state = hooks[-1]
        if type(state).__name__ in _STATEFUL:
            raise ConfigurationError(
                message=f"A hook with a {type(state).__name__} cannot be used in manual optimisation.",
                facts="it keeps gradients from step to step, and there a step may have any number of "
                "backward passes, each over other parameters.",
                remedy='comm_hook="bf16_compress", or automatic_optimization = True.',
            )
        return cls(hook, state)

    def reduce(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
        """Average the gradients of `parameters` over the ranks with the hook, in place.

        A separate all-reduce says which gradients exist, because a hook may round or drop the flags. A
        gradient that exists on no rank stays None, as in `reduce_gradients`.

        Collective: every rank must call this, with the same parameters in the same order.
        """
        buckets = list(buckets_of(require_dense(parameters), BUCKET_BYTES))
        works = []
        for index, members in enumerate(buckets):
            bucket = HookBucket(members, index, index + 1 == len(buckets))
            works.append((members, self.hook(self.state, bucket)))
        flags = [float(member.grad is not None) for members in buckets for member in members]
        if not flags:
            return
        exist = torch.tensor(flags, device=buckets[0][0].device)
        dist.all_reduce(exist, group=group)
        exists = iter(exist.tolist())
        for members, future in works:
            reduced: Any = future.wait()
            flat = reduced if isinstance(reduced, Tensor) else reduced[0]
            write_means(members, flat, list(itertools.islice(exists, len(members))))


def read_state(state: Any) -> dict[str, Any]:
    """Return what a checkpoint needs of a hook's state, in plain types and tensors; {} for nothing.

    A user's own state may have a method `state_dict()`.
    """
    if callable(own := getattr(state, "state_dict", None)):
        return dict(own())
    return {"iter": state.iter} if isinstance(getattr(state, "iter", None), int) else {}  # torch's local SGD


def write_state(state: Any, saved: Mapping[str, Any]) -> None:
    """Restore what `read_state` returned."""
    if not saved:
        return
    if callable(own := getattr(state, "load_state_dict", None)):
        own(saved)
    elif "iter" in saved and isinstance(getattr(state, "iter", None), int):
        state.iter = saved["iter"]


def state_for_rank(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return one rank's part of the states that all ranks have saved.

    If the world size has changed, every rank gets the mean of all ranks' errors, so that the average of what
    has not been sent yet stays the same.
    """
    if len(saved) == world_size:
        return dict(saved[rank])
    first = dict(saved[0])
    if errors := first.get("errors"):
        first["errors"] = {}
        others = [state["errors"] for state in saved]
        for name in errors:
            parts = [other[name] for other in others if name in other]
            first["errors"][name] = torch.stack(parts).sum(dim=0) / len(others)
    return first

"""Wrap, compile, convert and check a module for `setup_module`, and undo it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.comm_hook import register_ddp_comm_hook
from rankwise.launchers import Launcher
from rankwise.process_group.collective_check import CollectiveCheck
from rankwise.process_group.interception import call_from_here
from rankwise.process_group.rank_comparison import has_values

# Where torch keeps what module.compile() made.
_COMPILED = "_compiled_call_impl"


@final
class WrappedModules:
    """The modules that `setup_module` has prepared in a job."""

    def __init__(self) -> None:
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.plain: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # nothing in them is trained
        self._batchnorms: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, _BatchNorm, _BatchNorm]]]
        self._batchnorms = weakref.WeakKeyDictionary()

    def sync_batchnorms(self, module: nn.Module, group: ProcessGroup | None) -> None:
        """Replace layers by `SyncBatchNorm`; their parameters and buffers stay the same objects."""
        if _is_replaceable(module):
            raise ConfigurationError(
                message="sync_batchnorm=True cannot replace a module that is itself a batch normalisation.",
                remedy=f"wrap it: nn.Sequential({type(module).__name__}(...)).",
            )
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if isinstance(layer, _BatchNorm) and _is_replaceable(layer):
                    synced = nn.SyncBatchNorm.convert_sync_batchnorm(layer, group)
                    setattr(owner, name, synced)
                    self._batchnorms.setdefault(owner, []).append((name, layer, synced))

    def restore_batchnorms(self) -> None:
        """Put the original layers back, with the trained parameters and buffers."""
        replaced = [(owner, *each) for owner, found in self._batchnorms.items() for each in found]
        for owner, name, layer, synced in replaced:
            if owner._modules.get(name) is synced:
                layer._parameters.update(synced._parameters)
                layer._buffers.update(synced._buffers)
                layer.training = synced.training
                layer.track_running_stats = synced.track_running_stats
                setattr(owner, name, layer)
        self._batchnorms.clear()

    def wrapper_of(self, module: nn.Module) -> DistributedDataParallel | None:
        """Return the wrapper that `module` has or is."""
        return next((each for each in self.wrappers if module in (each, each.module)), None)

    def close(self) -> None:
        """Restore batch normalisation, and separate the wrappers from their process group."""
        self.restore_batchnorms()
        # torch sometimes aborts when a group is destroyed before the reducer of a wrapper. A wrapper may
        # outlive the job, as in the traceback of its forward pass; the group, which listens, must not.
        for wrapper in list(self.wrappers):
            for part in ("reducer", "logger"):
                wrapper.__dict__.pop(part, None)
            wrapper._comm_hooks.clear()
            wrapper.__dict__["process_group"] = None
        self.wrappers.clear()


def _is_replaceable(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


def own_memory(module: nn.Module, launcher: Launcher | None) -> None:
    """Move parameters and buffers out of shared memory, which a forked rank has in common with the others.

    `launcher` is the placement's: a rank that was not forked has none, unless it runs in the caller.
    """
    if launcher is None or launcher.runs_in_caller:
        return
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if has_values(tensor) and tensor.is_cpu and tensor.is_shared():
            storage = tensor.untyped_storage()
            own = copies.setdefault(storage.data_ptr(), storage.clone())
            place = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(own, *place)


def wrapped_in_place(
    strategy: Any, module: nn.Module, wrap: Callable[[nn.Module], nn.Module], ddp_kwargs: dict[str, Any]
) -> object:
    """Call `configure_ddp()`, which puts the wrapper into `strategy.model` as in Lightning 2; return it."""
    given: dict[str, Any] = {
        "model": module,
        "_ddp_kwargs": ddp_kwargs,
        "_setup_model": wrap,
        # the strategy sets DDP's options and registers the hook by itself
        **dict.fromkeys(("pre_configure_ddp", "_register_ddp_hooks"), lambda: None),
    }
    own = vars(strategy)
    before = {name: own[name] for name in given if name in own}
    own.update(given)
    try:
        strategy.configure_ddp()
        return strategy.model
    finally:
        for name in given:
            own.pop(name, None)
        own.update(before)


def check_collectives_of(wrapped: DistributedDataParallel, check: CollectiveCheck) -> None:
    """Also compare the collectives that a wrapper runs in C++.

    Buckets are averaged in a hook instead of C++. The forward pass after the first step, in which C++
    rebuilds the buckets, is compared as a whole.
    """
    if not wrapped._comm_hooks:
        register_ddp_comm_hook(wrapped, hook="allreduce")
    has_stepped = False

    def before_forward(module: Any, args: Any) -> None:
        nonlocal has_stepped
        if not torch.is_grad_enabled():
            return
        if has_stepped:
            handle.remove()
            check.compare(call_from_here(module.process_group, "forward pass of DistributedDataParallel"))
        has_stepped |= module.require_backward_grad_sync

    handle = wrapped.register_forward_pre_hook(before_forward)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that was passed to `torch.compile`; any other module as it is."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    if frames is None or not isinstance(module, frames.OptimizedModule):
        return module
    inner: Any = module._orig_mod
    return inner  # type: ignore[no-any-return]  # a module


def compile_within(module: nn.Module, compiled: nn.Module) -> Callable[[], None]:
    """Compile calls of `module`, in place, with the options of `compiled`; return a function that undoes it.

    Names of parameters stay as they are. Within a wrapper's forward pass torch splits the graph at bucket
    boundaries, so that communication overlaps with the backward pass.
    """
    before = module.__dict__.get(_COMPILED)
    context: Any = getattr(compiled, "dynamo_ctx")  # noqa: B009  nn.Module declares parameters and modules only

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module.__dict__[_COMPILED] = context(call)  # our own frame: torch does not compile its containers' frames
    reference = weakref.ref(module)

    def undo() -> None:
        if (found := reference()) is not None:
            found.__dict__[_COMPILED] = before

    return undo


def forward_redirect(wrapper: nn.Module, module: nn.Module, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call `wrapper(...)` so that it runs `module.<method>` instead of `module.forward`; return the result.

    Inside the method `self(...)` and `self.forward(...)` are the module's own again, compiled if
    `module.compile()` was called.
    """
    if wrapper is module:
        return getattr(module, method)(*args, **kwargs)
    own = module.__dict__
    hidden = [(each, each[_COMPILED]) for each in (own, wrapper.__dict__) if each.get(_COMPILED) is not None]

    def restore() -> None:
        own.pop("forward", None)
        for each, compiled in hidden:
            each[_COMPILED] = compiled

    def run(*inner: Any, **named: Any) -> Any:
        restore()
        return getattr(module, method)(*inner, **named)

    # An instance attribute hides the class's method. Written to __dict__: nn.Module.__setattr__ is slow.
    own["forward"] = run
    for each, _ in hidden:
        each[_COMPILED] = None
    try:
        return wrapper(*args, **kwargs)
    finally:
        if own.get("forward") is run:  # it was not called
            restore()

"""What `setup_module` does to a module: wrap, compile, convert, check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.gradient_sync.comm_hook import is_averaging

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "SyncedBatchNorms",
    "averages_everywhere",
    "check_sync_batchnorm",
    "checked_wrapper",
    "compile_within",
    "uncompiled",
]


def checked_wrapper(wrapped: object, strategy: str, group: ProcessGroup | None) -> DistributedDataParallel:
    """Return `wrapped`, if it averages gradients over the ranks of `group` (None for all).

    Args:
        wrapped: what `configure_ddp` returned.
        strategy: the name of the strategy's class.
        group: the strategy's `data_parallel_group`.

    Raises:
        InvalidTypeError: when it is no wrapper.
        ConfigurationError: when it averages over other ranks than those that share out the data.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        raise InvalidTypeError(
            argument=f"{strategy}.configure_ddp()",
            value=wrapped,
            expected="it to return a DistributedDataParallel",
        )
    averaged, sharing = _ranks_of(wrapped.process_group), _ranks_of(group)
    if set(averaged) != set(sharing):
        raise ConfigurationError(
            message=f"{strategy}.configure_ddp() averages gradients over other ranks than share the data.",
            facts=f"its wrapper's process_group has the ranks {averaged}, data_parallel_group {sharing}.",
            remedy=f"{type(wrapped).__name__}(module, device_ids=device_ids, "
            "process_group=self.data_parallel_group, **self.ddp_kwargs).",
        )
    return wrapped


def _ranks_of(group: ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


_COMPILED = "_compiled_call_impl"  # where torch keeps what module.compile() made


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given; any other as it is."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")  # without it nobody has compiled anything
    if frames is None or not isinstance(module, frames.OptimizedModule):
        return module
    inner: Any = module._orig_mod
    return inner  # type: ignore[no-any-return]  # a module


def compile_within(module: nn.Module, compiled: nn.Module) -> Callable[[], None]:
    """Compile calls of `module`, in place, with the options of `compiled`; return what undoes it.

    Names of parameters stay as they are, and within a wrapper's forward pass torch cuts the graph where its
    buckets end, so that gradients travel while others are computed.
    """
    before = module.__dict__.get(_COMPILED)
    context: Any = getattr(compiled, "dynamo_ctx")  # noqa: B009  nn.Module knows parameters and modules only

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module.__dict__[_COMPILED] = context(call)  # a frame of ours: torch compiles none of its own containers'
    return lambda: module.__dict__.update({_COMPILED: before})


_COMPILED = "_compiled_call_impl"  # where torch keeps what module.compile() made


def forward_redirect(wrapper: nn.Module, module: nn.Module, method: str, *args: Any) -> Any:
    """Return `module.<method>(*args)`, called where `wrapper` calls the module's `forward`.

    Inside the method `self(...)` and `self.forward(...)` are the module's own again, compiled where
    `module.compile()` was called.
    """
    if wrapper is module:
        return getattr(module, method)(*args)
    own = module.__dict__
    hidden = [(each, each[_COMPILED]) for each in (own, wrapper.__dict__) if each.get(_COMPILED) is not None]

    def restore() -> None:
        own.pop("forward", None)
        for each, compiled in hidden:
            each[_COMPILED] = compiled

    def run(*inner: Any) -> Any:
        restore()
        return getattr(module, method)(*inner)

    # Instance attributes hide the class's; written past nn.Module's slow __setattr__.
    own["forward"] = run
    for each, _ in hidden:
        each[_COMPILED] = None
    try:
        return wrapper(*args)
    finally:
        restore()


@final
class SyncedBatchNorms:
    """The layers of one module that were replaced, with what they replaced."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []

    def convert(self, module: nn.Module, group: ProcessGroup | None) -> None:
        """Replace the layers below `module`; parameters and buffers stay the same objects."""
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                    synced = nn.SyncBatchNorm.convert_sync_batchnorm(layer, group)
                    setattr(owner, name, synced)
                    self._replaced.append((owner, name, layer, synced))

    def revert(self) -> None:
        """Put the layers back, with what training has made of their parameters and buffers."""
        for owner, name, layer, synced in self._replaced:
            if owner._modules.get(name) is synced:
                layer._parameters.update(synced._parameters)
                layer._buffers.update(synced._buffers)
                layer.training = synced.training
                setattr(owner, name, layer)
        self._replaced.clear()


def check_sync_batchnorm(device: torch.device) -> None:
    """Make sure that torch has `SyncBatchNorm` for a device.

    Raises:
        ConfigurationError: when it has not.
    """
    if device.type == "cpu":
        raise ConfigurationError(
            message="sync_batchnorm=True is not possible on the CPU: torch has no SyncBatchNorm there.",
            remedy="leave it out, or train on CUDA devices.",
        )


def averages_everywhere(wrapper: DistributedDataParallel) -> bool:
    """Return whether every gradient is averaged over the wrapper's group, as far as can be known."""
    hooks: list[Any] = [hook for hook, _ in wrapper._comm_hooks]
    return not wrapper.parameters_to_ignore and all(is_averaging(hook) for hook in hooks)

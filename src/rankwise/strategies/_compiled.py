"""`torch.compile` and wrapping: a compiled module is wrapped plain, and compiled within the wrapper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["compile_within", "uncompiled"]

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

"""`gradient_sync_context`: average gradients in any training loop."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rankwise.gradient_sync.options import GradientSyncMode, resolve_sync_mode
from rankwise.gradient_sync.sync import GradientSync


def gradient_sync_context(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    is_final_microbatch: bool = True,
    mode: GradientSyncMode | str = "auto",
    group: dist.ProcessGroup | None = None,
) -> AbstractContextManager[None]:
    """Compute gradients in the block, and average them over the ranks after the window's last microbatch.

    Works with any `DistributedDataParallel` in any training loop. It does nothing without a process group,
    and with `forced_sync` the module need not be wrapped. If the block raises, nothing is averaged after
    it.

    Collective: every rank must enter it, with the same mode and parameters. In the window's last microbatch
    (with `multi_auto_sync` in each one) the ranks wait for each other.

    Args:
        module: the wrapped module.
        optimizers: `forced_sync` also averages their parameters that the module does not list.
        is_final_microbatch: whether the optimizers step next.
        mode: when gradients are averaged.
        group: for a module that is not wrapped, the ranks to average over; all of them by default.

    Raises:
        UnknownNameError: for an unknown mode.
        InvalidTypeError: for a module that is not wrapped with DDP, in a mode that needs DDP.
        UnusedParametersError: when the loss does not depend on some parameters, and DDP does not look for
            unused ones.
    """
    finds_unused = bool(getattr(module, "find_unused_parameters", False))
    sync = _sync_in(resolve_sync_mode(mode, finds_unused_parameters=finds_unused))
    return sync.context(module, optimizers, is_final_microbatch, _no_sync, group=group)


@functools.cache
def _sync_in(mode: GradientSyncMode) -> GradientSync:
    return GradientSync(sync_mode=mode, needs_ddp=True)


def _no_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()

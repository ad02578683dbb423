"""One set of buffers on all ranks: rank 0's, by DDP's own means, also where it is held back."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["share_buffers", "share_buffers_next"]


def share_buffers_next(module: nn.Module) -> None:
    """Let DDP share buffers before the next forward pass, as it does after one whose gradients it averages.

    Where it is held back and rankwise averages, it must be told.
    """
    if isinstance(module, DistributedDataParallel):
        module.require_forward_param_sync = True


def share_buffers(module: nn.Module) -> None:
    """Give all ranks rank 0's buffers now; do nothing where DDP was told to leave them alone.

    Collective: every rank must call this.
    """
    share_buffers_next(module)
    if isinstance(module, DistributedDataParallel) and module.will_sync_module_buffers():
        module._sync_buffers()

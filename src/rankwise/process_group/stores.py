"""The store of the process group that exists."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["default_store"]


def default_store() -> dist.Store:
    """Return the default process group's store; torch has no public name for it.

    Raises:
        ValueError: when there is no process group.
    """
    return distributed_c10d._get_default_store()

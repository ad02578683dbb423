"""Destroy torch's process groups so that none of their own threads is the last to have one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["destroy_process_groups"]

# How long a callback may take to be dropped once all that waited for it can go on.
_LONGEST_S = 1.0


def destroy_process_groups() -> None:
    """Destroy the default process group and all others, and let go of them a moment after everybody else.

    A group of gloo's ends its threads with its last reference. One of these threads runs the callbacks of
    futures, communication hooks' among them, and drops them when those that waited for the result are at
    work again already. A callback that refers to the group may so be the last that does: the thread would
    wait for its own end, which aborts the process.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    if _are_held_elsewhere(groups):
        holding = threading.Timer(_LONGEST_S, groups.clear)
        holding.daemon = True
        holding.start()


def _are_held_elsewhere(groups: Sequence[dist.ProcessGroup]) -> bool:
    *counts, of_nobody = [sys.getrefcount(one) for one in (*groups, object())]
    return max(counts, default=0) > of_nobody + 1  # which is in no sequence of ours

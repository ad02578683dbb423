"""Destroy torch's process groups so that none of their own threads has to wait for itself."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist

__all__ = ["destroy_process_groups"]


def destroy_process_groups() -> None:
    """Destroy the default process group and all others, and have them end where they can.

    A group of gloo's ends its threads, and waits for them, when its last reference goes. One of these
    threads runs the callbacks of futures, communication hooks' among them, and drops them when those that
    waited for the result are at work again already. A callback that refers to the group may so be the last
    that does: the thread would wait for itself, which aborts the process.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        # What has the threads is the back end: while it is kept, a group can go anywhere.
        backends = [group._get_backend(device_type) for device_type in group._device_types]
        weakref.finalize(group, _end, backends).atexit = False
    dist.destroy_process_group()


def _end(backends: list[Any]) -> None:
    if threading.get_ident() == threading.main_thread().ident:
        backends.clear()
    else:  # this may be a thread of theirs
        threading.Thread(target=backends.clear, name="rankwise-letting-go", daemon=True).start()

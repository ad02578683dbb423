"""Wait for what other ranks put into a store, so that signals are handled meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from rankwise.stores.private import is_private

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


def poll_until(is_done: Callable[[], bool], timeout: timedelta) -> bool:
    """Call `is_done` until it returns True, with growing pauses; return False after `timeout`.

    `TCPStore.wait` blocks in C++, where Python runs no signal handler, and writes a warning to stderr when it
    times out. Its `check` returns at once.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def wait_for_keys(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> bool:
    """Return whether all keys are set within `timeout`.

    Raises:
        torch.distributed.DistStoreError: when the job is stopped meanwhile, or the store's host is gone.
    """
    if not is_private(store):
        return poll_until(lambda: store.check(list(keys)), timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        store.wait(list(keys), timeout)
    except dist.DistStoreError:
        if time.monotonic() < deadline:
            raise
        return False
    return True

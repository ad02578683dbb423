"""Wait for keys of a store for as long as it takes."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

__all__ = ["wait_long"]

_LONG = timedelta(days=20)


def wait_long(store: dist.Store, key: str) -> None:
    """Wait for a key for as long as it takes."""
    while True:
        began_s = time.monotonic()
        try:
            store.wait([key], _LONG)
            return
        except dist.DistStoreError:
            if time.monotonic() - began_s < _LONG.total_seconds() / 2:
                raise  # the store is gone, or this rank has to leave

"""What must be closed, paused or imported around a fork."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Protocol


class Closable(Protocol):
    """Something with a descriptor that a child must not keep."""

    def close(self) -> None:
        """Close it."""


_closed_in_child: set[Closable] = set()


def close_in_child(*descriptors: Closable) -> None:
    """Close these in every process forked from now on, so that end-of-file means what it says."""
    _hook()
    _closed_in_child.update(descriptors)


def forget(*descriptors: Closable) -> None:
    """Stop closing these: they are closed here."""
    _closed_in_child.difference_update(descriptors)


@functools.cache  # a hook stays, in children too
def _hook() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for descriptor in _closed_in_child:
        descriptor.close()
    _closed_in_child.clear()


_PAUSE_SOFT = 1  # omp_pause_soft, OpenMP 5.0 section 3.6.1


def pause_openmp() -> bool:
    """Release the threads of every loaded libgomp; return whether all agreed.

    The pool comes back by itself at the next parallel region, here and in the child.
    """
    return all(_pause(library) for library in _loaded_libgomps())


def _loaded_libgomps() -> set[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()  # no /proc, so no GNU/Linux: other pools survive a fork
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.splitlines() if "libgomp" in line}
    return {path for path in paths if path.startswith("/")}


def _pause(library: str) -> bool:
    try:
        return bool(ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_SOFT) == 0)
    except (OSError, AttributeError):
        return False


_CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # importing it sets this one, for no user of ours


def import_dynamo() -> None:
    """Import what the first `DistributedDataParallel()` imports: 0.8 s, in every rank anew."""
    is_set = _CACHE_FOLDER in os.environ
    import torch._dynamo  # noqa: F401

    if not is_set:
        os.environ.pop(_CACHE_FOLDER, None)

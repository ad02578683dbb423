"""Prepare a process for a fork: close, pause and import what the fork needs."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from rankwise.start import collections_paused

# Sockets, selectors and files: closing one twice does nothing.
_closed_in_child: WeakSet[Any] = WeakSet()


def close_in_child(*descriptors: Any) -> None:
    """Close these in every process forked from now on: a copy there would delay their end of file."""
    _closed_in_child.update(descriptors)


def _after_fork() -> None:
    for descriptor in _closed_in_child:
        descriptor.close()
    _closed_in_child.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collections in the block, and in processes that it forks.

    A collection writes to each object that it visits: a fork would copy the memory that it shares.
    """
    is_ours = gc.get_freeze_count() == 0  # a program may have frozen its objects itself
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def release_memory() -> None:
    """Give unused memory back to the system: a fork would inherit it."""
    if gc.isenabled():
        gc.collect(0)  # garbage of imports
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)


_PAUSE_SOFT = 1  # omp_pause_soft, OpenMP 5.0 section 3.6.1


def pause_openmp() -> bool:
    """End the threads of each loaded libgomp; return whether that succeeded.

    libgomp starts them again at the next parallel region, here and in the child.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # no /proc, so no GNU/Linux: other OpenMP libraries survive a fork
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.splitlines() if "libgomp" in line}
    libraries = [path for path in paths if path.startswith("/")]
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_SOFT) == 0 for path in libraries)
    except (OSError, AttributeError):
        return False


# Importing torch._dynamo sets this variable, as the first optimizer or wrapper does.
SET_BY_DYNAMO = "TORCHINDUCTOR_CACHE_DIR"


def import_functional() -> None:
    """Import `torch.distributed.nn.functional`, as `torch._dynamo` or the first wrapper would.

    Up to torch 2.8 that makes a temporary folder, which is removed: a process that is killed would leave it.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    is_first = "torch.distributed.nn.functional" not in sys.modules
    import torch.distributed.nn.functional  # noqa: F401 -- the effect is wanted

    instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if is_first and (folder := getattr(instantiator, "_TEMP_DIR", None)) is not None:
        folder.cleanup()


def import_dynamo() -> None:
    """Import what the first optimizer or `DistributedDataParallel` would import, in 1 s; forks inherit it.

    The import creates a folder for compiled code, which is removed: a compilation creates it if necessary.
    """
    import_functional()
    is_set, is_new = SET_BY_DYNAMO in os.environ, "torch._dynamo" not in sys.modules
    before = set(Path(tempfile.gettempdir()).glob("torchinductor_*")) if is_new else set()
    with collections_paused():
        import torch._dynamo  # noqa: F401 -- the effect is wanted

    folder = None if is_set else os.environ.pop(SET_BY_DYNAMO, None)
    if is_new and folder is not None and Path(folder) not in before:
        with suppress(OSError):  # another process uses it, or has removed it
            Path(folder).rmdir()

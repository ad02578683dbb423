"""Put the OpenMP pool to rest before a fork: a child would wait for threads that it has not got."""

from __future__ import annotations

import ctypes
from pathlib import Path

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

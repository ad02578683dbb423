"""What is done before a fork: memory that is not used is given back."""

import ctypes
import os
import weakref
from pathlib import Path

import pytest

from rankwise.processes.fork_safety import release_memory

MIB = 2**20


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def _resident() -> int:
    """Return how much memory this process has, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_young_garbage_is_freed() -> None:
    """What imports leave behind is not inherited by a fork."""
    node = Node()
    freed = weakref.ref(node)
    del node
    release_memory()
    assert freed() is None


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="has no glibc")
def test_free_memory_goes_back_to_the_system() -> None:
    """Glibc keeps what is freed below something that is in use."""
    blocks = [bytes(range(256)) * 400 for _ in range(640)]  # 62 MiB; larger blocks would not be in the heap
    kept = blocks.pop()
    full = _resident()
    blocks.clear()
    release_memory()
    assert full - _resident() > 32 * MIB
    assert len(kept) == 256 * 400

"""What a forked child does at once: let go of our channels, and leave when the rank that forked it does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Closable(Protocol):
    """Something with a descriptor that a child must not keep."""

    def close(self) -> None:
        """Close it."""


_closed_in_child: set[Closable] = set()
_lifeline: tuple[int, int] | None = None  # a pipe; in a child the write end, its parent's, is -1
_ties_children = False
_is_hooked = False


def close_in_child(*descriptors: Closable) -> None:
    """Close these in every process forked from now on, so that end-of-file means what it says."""
    _hook()
    _closed_in_child.update(descriptors)


def forget(*descriptors: Closable) -> None:
    """Stop closing these: they are closed here."""
    _closed_in_child.difference_update(descriptors)


def tie_children_to_this_process() -> None:
    """Make every process that this rank forks (DataLoader workers above all) leave when this rank is gone.

    Creates: one pipe, for the life of this process.
    """
    global _lifeline, _ties_children
    _ties_children = True
    if _lifeline is None or _lifeline[1] < 0:
        _hook()
        _lifeline = os.pipe()


@contextmanager
def children_tied() -> Iterator[None]:
    """Do so with what is forked in the block, and leave later children of this process alone."""
    global _ties_children
    before = _ties_children
    tie_children_to_this_process()
    try:
        yield
    finally:
        _ties_children = before


def _hook() -> None:
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _lifeline
    for descriptor in _closed_in_child:
        descriptor.close()
    _closed_in_child.clear()
    if _lifeline is None:
        return
    read_end, write_end = _lifeline
    if write_end >= 0:
        os.close(write_end)
    if _ties_children:
        _lifeline = (read_end, -1)
        threading.Thread(target=_leave_with_parent, args=(read_end,), daemon=True).start()
    else:
        _lifeline = None
        os.close(read_end)


def _leave_with_parent(read_end: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread's to take
    os.read(read_end, 1)  # end of file, when the rank is gone
    os._exit(1)

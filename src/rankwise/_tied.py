"""What a rank starts leaves when the rank does, however that ends: DataLoader workers above all.

A rank holds the write end of a pipe, and each process that it forks, or that multiprocessing starts in it,
waits in a thread for the end of file. A fork has the pipe by itself. A spawned process runs no hook of a
fork, and what a forkserver has forked is no child of the rank; these get the pipe with their `Process`
object, which takes over the `_config` of the process that makes it, and is pickled with it. They read it
before the user's data, and after the main module: until that is imported they are not tied.

So no function of multiprocessing is replaced, a rank that is killed has nothing left to do, and programs that
it starts with `subprocess` are left alone. To look for a rank's children instead would come too late: a rank
that was killed has none any more.

Only the standard library is imported: the processes that unpickle this need not have torch.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from typing import Any

from typing_extensions import final

__all__ = ["children_tied", "tie_children_to_this_process"]

_KEY = "rankwise"

_lifeline: tuple[int, int] | None = None  # a pipe; in a child the write end, its parent's, is -1
_reasons = 0  # to tie children: the blocks that this process is in, and one for good in a rank


def tie_children_to_this_process() -> None:
    """Make every process that this rank forks, or starts by multiprocessing, leave when this rank is gone.

    Creates: one pipe, for the life of this process.
    """
    global _lifeline, _reasons
    _reasons += 1
    _config()[_KEY] = _TIE
    if _lifeline is None or _lifeline[1] < 0:
        _hook()
        _lifeline = os.pipe()


@contextmanager
def children_tied() -> Iterator[None]:
    """Do so with what is started in the block, and leave later children of this process alone."""
    global _reasons
    tie_children_to_this_process()
    try:
        yield
    finally:
        _reasons -= 1
        if not _reasons:
            _config().pop(_KEY, None)


@final
class _Tie:
    """What a `Process` object carries: unpickled in the process that it stands for, it ties that one."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if _lifeline is None or not _reasons:
            return type(None), ()  # the block in which the object was made has been left
        return _receive, (reduction.DupFd(_lifeline[0]),)


_TIE = _Tie()  # one, as a descriptor can be given to a new process only once


def _receive(duplicate: Any) -> _Tie:
    read_end = duplicate.detach()
    os.set_inheritable(read_end, False)
    _hook()
    _be_tied(read_end)
    return _TIE


@functools.cache  # a hook stays, in children too
def _hook() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _lifeline
    if _lifeline is None:
        return
    read_end, write_end = _lifeline
    if write_end >= 0:
        os.close(write_end)
    if _reasons:
        _be_tied(read_end)
    else:
        _lifeline = None
        os.close(read_end)


def _be_tied(read_end: int) -> None:
    global _lifeline, _reasons
    _lifeline = (read_end, -1)
    _reasons += 1
    threading.Thread(target=_leave_with_parent, args=(read_end,), daemon=True).start()


def _leave_with_parent(read_end: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread's to take
    os.read(read_end, 1)  # end of file, when the rank is gone
    os._exit(1)


def _config() -> dict[str, object]:
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # typeshed leaves it out
    return config

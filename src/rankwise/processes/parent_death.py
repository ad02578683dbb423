"""End a process when the one that started it ends.

A worker leaves by itself when its channel ends. It cannot while it starts, as its first seconds go into
importing torch before it reaches rankwise, nor while C code holds the interpreter's lock. So the launching
process also holds the one end of a pipe, and asks for a SIGKILL to the worker when that end is closed.
Source: fcntl(2), F_SETSIG and F_SETOWN.

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

import fcntl
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from typing import Any, final

from rankwise.processes import fork_safety

__all__ = ["ParentDeathPipe", "children_end_with_parent", "end_children_with_this_process"]

_IS_LINUX = sys.platform == "linux"


@final
class ParentDeathPipe:
    """One worker's. On Linux alone; elsewhere it does nothing.

    Attributes:
        worker_end: the descriptor that the worker must inherit; it need not know what for.
    """

    def __init__(self) -> None:
        self.worker_end, own_end = os.pipe()
        self._own_end = os.fdopen(own_end, "wb", buffering=0)
        fork_safety.close_in_child(self._own_end)
        self._is_tied = False

    def tie(self, pid: int) -> None:
        """Tie a worker that has inherited its end to this process's life."""
        if _IS_LINUX:
            with suppress(ProcessLookupError):  # it has ended already
                fcntl.fcntl(self.worker_end, fcntl.F_SETOWN, pid)
                fcntl.fcntl(self.worker_end, fcntl.F_SETSIG, signal.SIGKILL)
                flags = fcntl.fcntl(self.worker_end, fcntl.F_GETFL)
                fcntl.fcntl(self.worker_end, fcntl.F_SETFL, flags | os.O_ASYNC)
        self._is_tied = True
        os.close(self.worker_end)

    def close(self) -> None:
        """Let go of a worker that has ended, or was never started."""
        if not self._is_tied:
            os.close(self.worker_end)
        fork_safety.forget(self._own_end)
        self._own_end.close()


_KEY = "rankwise"

_parent_pipe: tuple[int, int] | None = None  # a pipe; in a child the write end, its parent's, is -1
_reasons = 0  # to tie children: the blocks that this process is in, and one for good in a rank


def end_children_with_this_process() -> None:
    """Make every process that this rank forks, or starts by multiprocessing, leave when this rank is gone.

    Creates: one pipe, for the life of this process.
    """
    global _parent_pipe, _reasons
    _reasons += 1
    _config()[_KEY] = _TIE
    if _parent_pipe is None or _parent_pipe[1] < 0:
        _hook()
        _parent_pipe = os.pipe()


@contextmanager
def children_end_with_parent() -> Iterator[None]:
    """Do so with what is started in the block, and leave later children of this process alone."""
    global _reasons
    end_children_with_this_process()
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
        if _parent_pipe is None or not _reasons:
            return type(None), ()  # the block in which the object was made has been left
        return _receive, (reduction.DupFd(_parent_pipe[0]),)


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
    global _parent_pipe
    if _parent_pipe is None:
        return
    read_end, write_end = _parent_pipe
    if write_end >= 0:
        os.close(write_end)
    if _reasons:
        _be_tied(read_end)
    else:
        _parent_pipe = None
        os.close(read_end)


def _be_tied(read_end: int) -> None:
    global _parent_pipe, _reasons
    _parent_pipe = (read_end, -1)
    _reasons += 1
    threading.Thread(target=_leave_with_parent, args=(read_end,), daemon=True).start()


def _leave_with_parent(read_end: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread's to take
    os.read(read_end, 1)  # end of file, when the rank is gone
    os._exit(1)


def _config() -> dict[str, object]:
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # typeshed leaves it out
    return config

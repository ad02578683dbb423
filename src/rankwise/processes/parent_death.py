"""End a process when the one that started it ends.

The parent holds the write end of a pipe, and the process that must end with it holds the read end. On Linux
that process asks the kernel for SIGKILL at end of file (fcntl(2): F_SETSIG, F_SETOWN, O_ASYNC). So it ends in
every state: while it imports torch, and while C code holds the interpreter's lock. Elsewhere a thread reads.

- Workers: the launching process asks in their place, as soon as it has their process id.
- Workers of torch's elastic agent, which does not publish their process ids: each asks for itself.
- Processes that a rank forks or starts with multiprocessing, such as a DataLoader's workers: each asks for
  itself. A fork inherits the pipe, and a fork hook asks. A spawned process runs no such hook, and a process
  of a forkserver is not a child of the rank. These get the pipe with their `Process` object: it takes over
  the `_config` of the process that makes it, and is pickled with it. It is read after the main module is
  imported, and before the user's data. Programs that a rank starts with `subprocess` are left alone.

Only the standard library is imported: the processes that unpickle this need not have torch.
"""

from __future__ import annotations

import fcntl
import functools
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from typing import Any, final

from rankwise.processes import fork_safety


@final
class ParentDeathPipe:
    """A pipe. This process holds the write end for its workers; processes that it forks do not."""

    def __init__(self) -> None:
        self.worker_end, own_end = os.pipe()  # a worker must inherit the former
        self._own_end = os.fdopen(own_end, "wb", buffering=0)
        fork_safety.close_in_child(self._own_end)
        self._is_tied = False

    def tie(self, pid: int) -> None:
        """End the one worker that has inherited `worker_end` with this process. Only on Linux."""
        with suppress(ProcessLookupError, AttributeError):  # it has ended already; no Linux
            _kill_at_end_of_file(self.worker_end, pid)
        self._is_tied = True
        os.close(self.worker_end)

    def close(self) -> None:
        """Close this process's ends; the workers must have ended, or never have been started."""
        if not self._is_tied:
            os.close(self.worker_end)
        self._own_end.close()


def end_with_writer(read_end: int) -> None:
    """End this process when the last write end of a pipe is closed."""
    own = read_end
    with suppress(OSError):  # no Linux
        # The signal belongs to an open file: not to the one that other processes have inherited too.
        own = os.open(f"/proc/self/fd/{read_end}", os.O_RDONLY | os.O_CLOEXEC)
    end_with_peer(own)


def end_with_peer(own: int) -> None:
    """End this process when the other end of a connection is closed, which must not carry anything more."""
    try:
        _kill_at_end_of_file(own, os.getpid())
    except (OSError, AttributeError):  # no Linux
        threading.Thread(target=_exit_at_end_of_file, args=(own,), daemon=True).start()
        return
    poll = select.poll()  # unlike select.select it takes descriptors of 1024 and more
    poll.register(own, select.POLLIN)
    if poll.poll(0):  # closed before
        os._exit(1)


def _kill_at_end_of_file(read_end: int, pid: int) -> None:
    fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)  # first: only Linux has it
    fcntl.fcntl(read_end, fcntl.F_SETOWN, pid)
    fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)


def _exit_at_end_of_file(read_end: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
    os.read(read_end, 1)
    os._exit(1)


_KEY = "rankwise"

# Read end and write end; the latter is -1 in a child, whose parent has it.
_pipe: tuple[int, int] | None = None
_users = 0  # blocks in which children are tied, and one for good in a rank and in a tied child


def end_children_with_this_process() -> None:
    """Make every process that this one forks, or starts by multiprocessing, end when this one has ended.

    Creates: one pipe, for the life of this process.
    """
    global _pipe, _users
    _users += 1
    _config()[_KEY] = _TIE
    if _pipe is None or _pipe[1] < 0:
        _hook_forks()
        _pipe = os.pipe()


@contextmanager
def children_end_with_parent() -> Iterator[None]:
    """Do so for processes that are started in the block, not for later children of this process."""
    global _users
    end_children_with_this_process()
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            _config().pop(_KEY, None)


@final
class _Tie:
    """Carried by a `Process` object: unpickled in the process that it stands for, it ties that one."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if _pipe is None or not _users:
            return type(None), ()  # the block in which the object was made has been left
        return _receive, (reduction.DupFd(_pipe[0]),)


_TIE = _Tie()  # one, as a descriptor can be given to a new process only once


def _receive(duplicate: Any) -> _Tie:
    read_end = duplicate.detach()
    os.set_inheritable(read_end, False)
    _hook_forks()
    _tie_this_process(read_end)
    return _TIE


@functools.cache  # a hook stays, in children too
def _hook_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _pipe
    if _pipe is None:
        return
    read_end, write_end = _pipe
    if write_end >= 0:
        os.close(write_end)
    if _users:
        _tie_this_process(read_end)
    else:
        _pipe = None
        os.close(read_end)


def _tie_this_process(read_end: int) -> None:
    global _pipe, _users
    _pipe = (read_end, -1)
    _users += 1
    end_with_writer(read_end)


def _config() -> dict[str, object]:
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # typeshed leaves it out
    return config

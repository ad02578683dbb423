"""Write the stacks of all ranks to stderr, on SIGUSR2 and when a collective times out."""

from __future__ import annotations

import faulthandler
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait

from rankwise.monitoring.heartbeat import MonitoredRank
from rankwise.processes.stderr import write_stderr

STACKS_SIGNAL = signal.SIGUSR2
_STDERR = 2
_WRITING_S = 0.05  # what a rank needs to write its stacks, so that the stacks of several ranks do not mix


@contextmanager
def stacks_on_signal() -> Iterator[None]:
    """Write this process's stacks to stderr on SIGUSR2 in the block, also while it is in a C call.

    Nothing changes outside the main thread, or where the signal has a handler already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        yield
        return
    write_stacks_on_signal()
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)


def write_stacks_on_signal() -> None:
    """Do so until this process ends; for a process that was started as a rank."""
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)


def dump_stacks(workers: Sequence[MonitoredRank], reason: str) -> None:
    """Make every local rank write its stacks, one after another. Runs on: the supervisor's thread."""
    for worker in workers:
        process = worker.process
        if worker.has_ended or (process is not None and not worker.has_started):
            continue
        pid = "this process" if process is None else f"pid {process.pid}"
        title = f"rankwise: {reason}; stacks of global_rank={worker.ranks.global_rank} ({pid}):\n"
        if process is None:
            write_stderr(title + _own_stacks())
        else:
            write_stderr(title)
            process.send_signal(STACKS_SIGNAL)
            if wait([process.fileno()], _WRITING_S):
                write_stderr("  (it has left)\n")


def _own_stacks() -> str:
    # faulthandler holds the GIL while it writes, and would block all threads on a slow reader of stderr.
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(could not be had: {error})\n"

"""Show what a rank that hangs is doing: its stacks on stderr, and torch's flight record in a file."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from rankwise.monitoring.heartbeat import MonitoredRank
from rankwise.processes.exit_codes import write_stderr
from rankwise.processes.started_process import is_suspended

STACKS_SIGNAL = signal.SIGUSR2  # what a user sends to a process for its stacks
# What the supervisor sends to a rank: another one, as SIGUSR2 may be the user's own there.
_FROM_SUPERVISOR = getattr(signal, "SIGRTMAX", STACKS_SIGNAL)
_STDERR = 2
_WRITING_S = 0.05  # what a rank needs to write its stacks, so that the stacks of several ranks do not mix
_DELIVERY_S = 1.0  # how long a busy machine may take to give a rank the signal
# Torch's variables for the flight record; the second of each pair is the older name.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@contextmanager
def stacks_on_signal() -> Iterator[None]:
    """Write this process's stacks to stderr on SIGUSR2 in the block, also while it is in a C call.

    Nothing changes outside the main thread, or where the signal has a handler already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        yield
        return
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)


def write_stacks_on_signal() -> None:
    """Do so until this process, which was started as a rank, ends; also for the supervisor's own signal."""
    numbers = {_FROM_SUPERVISOR}
    if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:  # a fork may have inherited a handler of the user's
        numbers.add(STACKS_SIGNAL)
    for number in numbers:
        faulthandler.register(number, file=_STDERR, all_threads=True)


def dump_stacks(workers: Sequence[MonitoredRank], reason: str) -> None:
    """Make every local rank write its stacks, one after another. Runs on: the supervisor's thread."""
    for worker in workers:
        process = worker.process
        title = f"rankwise: {reason}; stacks of global_rank={worker.ranks.global_rank}"
        if worker.has_ended:
            continue
        if process is None:
            write_stderr(f"{title} (this process):\n{_own_stacks()}")
        elif worker.has_started:
            write_stderr(f"{title} (pid {process.pid}):\n")
            if not process.is_here:
                write_stderr(f"  (not available: its host is {process.host!r}; send it SIGUSR2 there)\n")
                continue
            if not _has_signal(process.pid, "SigCgt", or_else=True):
                write_stderr("  (not available: it runs another program, or has no handler of the signal)\n")
                continue
            process.send_signal(_FROM_SUPERVISOR)
            if _wait_for_stacks(process.pid, process.fileno()):
                write_stderr("  (it has left)\n")


def _wait_for_stacks(pid: int, handle: int) -> bool:
    """Wait until a process has had the time to write its stacks; return whether it has ended."""
    latest = time.monotonic() + _DELIVERY_S
    is_pending = True
    while is_pending and time.monotonic() < latest:
        # On a busy machine a running process may not have been given the signal yet.
        is_pending = _has_signal(pid, "ShdPnd", or_else=False) and not is_suspended(pid)
        if wait([handle], _WRITING_S):
            return True
    return False


def _has_signal(pid: int, mask: str, *, or_else: bool) -> bool:
    """Return whether the signal is in a mask of a process; `or_else` if it has ended, or without /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return or_else
    found = re.search(rf"^{mask}:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return or_else if found is None else bool(int(found[1], 16) >> (_FROM_SUPERVISOR - 1) & 1)


def _own_stacks() -> str:
    # faulthandler holds the GIL while it writes, and would block all threads on a slow reader of stderr.
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"(could not be had: {error})\n"


def write_flight_record(global_rank: int) -> str:
    """Write this rank's latest collectives to a file that `torchfrtrace` reads; return its path.

    Torch records them if the user has turned that on; with NCCL torch writes the same file itself. Returns an
    empty path where nothing is recorded, as by an older torch with gloo, or the file cannot be written.
    """
    from torch._C import _distributed_c10d  # not above: a worker registers the signal before it loads torch

    is_on = any(os.environ.get(name, "0").strip() not in ("", "0") for name in _SIZES)
    dump = getattr(_distributed_c10d, "_dump_fr_trace", None)
    if not is_on or dump is None:
        return ""
    try:
        path = _prefix() + str(global_rank)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK  # of a pipe
        descriptor = os.open(path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(dump())
    except (OSError, RuntimeError):  # no permission; no home directory
        return ""
    return path


def _prefix() -> str:
    """Return the prefix that torch's variables name, or one in a folder that no other user can write to."""
    if named := [value for name in _PREFIXES if (value := os.environ.get(name))]:
        return named[0]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(folder / "rankwise_flight_record_")

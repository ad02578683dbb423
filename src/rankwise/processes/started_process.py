"""`StartedProcess`: a process that was started here: pid, a descriptor for its end, exit status.

The program may ignore SIGCHLD, or wait for all its children: then the kernel drops the exit status, or gives
it to that code, and it is unknown here.
"""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import final

from rankwise.processes.parent_death import ParentDeathPipe

_REPORT_TIMEOUT_S = 5.0
_RECORDING_TIMEOUT_S = 1.0
_STATUS_POLL_S = 0.001
_NO_FORKSERVER = 255  # what multiprocessing returns where the forkserver has ended first


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z, a debugger), and reacts to nothing but SIGKILL."""
    try:
        # Its title may be cut within a character.
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # the process is gone, or this is not Linux
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


class StartedProcess(ABC):
    """A process that was started from here, and that ends with this one."""

    pid: int  # on its host; 0 as long as it is unknown
    host: str = ""  # empty for this one, and as long as it is unknown
    was_killed: bool = False  # whether `kill` was called
    is_here: bool = True  # whether it can be given signals and looked up in /proc
    lost_channel: str = (  # why its channel may be closed while it runs
        "its process runs, but its channel is closed: it has replaced itself by another program "
        "(os.exec...), or closed a descriptor that it has not opened"
    )

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""

    @abstractmethod
    def wait(self) -> int | None:
        """Return the exit status of the process, which has ended, -n for signal n; None if unknown."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, if it still runs."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors; the process must have ended."""

    def send_signal(self, number: int) -> None:
        """Send a signal, where that is possible."""

    def is_suspended(self) -> bool:
        """Whether the process reacts to nothing but SIGKILL, as far as is known."""
        return False

    def has_memory(self) -> bool:
        """Whether the process runs a program, and does not end at this moment."""
        return True


class LocalProcess(StartedProcess):
    """A process on this machine. No other process is ever signalled."""

    def __init__(self, pid: int, parent_pipe: ParentDeathPipe) -> None:
        self.pid = pid
        self._parent_pipe = parent_pipe
        self._reaping = threading.Lock()
        self._is_reaped = False
        self._exit_status: int | None = None
        try:
            parent_pipe.tie(pid)
            self._end_descriptor = self._open_end_descriptor()
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait()
            raise

    def fileno(self) -> int:
        return self._end_descriptor

    def wait(self) -> int | None:
        """Reap the process, which has ended; return its exit status; see `StartedProcess.wait`."""
        with self._reaping:
            if not self._is_reaped:
                self._exit_status = self._reap()
                self._is_reaped = True
        return self._exit_status

    @abstractmethod
    def _reap(self) -> int | None:
        """Reap the process, once, as `wait` says. Without pidfds it may still be running."""

    def kill(self) -> None:
        """Send SIGKILL, if the process is still the one that was started."""
        self.was_killed = True
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process is still the one that was started."""
        with suppress(ProcessLookupError):
            if _HAS_PIDFD:
                signal.pidfd_send_signal(self._end_descriptor, number)
            elif not self._is_reaped:
                os.kill(self.pid, number)

    def is_suspended(self) -> bool:
        return is_suspended(self.pid)

    def has_memory(self) -> bool:
        """Whether it runs a program: while it ends, its memory goes before its descriptors are closed."""
        try:
            os.readlink(f"/proc/{self.pid}/exe")  # noqa: PTH115  a path that may not exist
        except OSError as error:  # or this is not Linux
            return isinstance(error, PermissionError)  # a program of another user
        return True

    def close(self) -> None:
        """Close the descriptors; the process must have been reaped."""
        os.close(self._end_descriptor)
        self._parent_pipe.close()

    def _open_end_descriptor(self) -> int:
        if not _HAS_PIDFD:
            return self._watch_in_thread()
        try:
            return os.pidfd_open(self.pid)
        except ProcessLookupError:  # a forkserver's child may have ended, and been reaped, already
            read_end, write_end = os.pipe()  # readable, as its other end is closed
            os.close(write_end)
            return read_end

    def _watch_in_thread(self) -> int:
        # Without pidfds (macOS, older kernels, some sandboxes) a thread waits, and writes to a pipe. Closing
        # the pipe is not enough: processes that are forked meanwhile have its write end.
        read_end, write_end = os.pipe()

        def watch() -> None:
            self.wait()
            os.write(write_end, b"\0")
            os.close(write_end)

        threading.Thread(target=watch, name="rankwise-wait", daemon=True).start()
        return read_end


def _has_pidfd() -> bool:
    try:
        descriptor = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(descriptor, 0)
        finally:
            os.close(descriptor)
    except (AttributeError, OSError):
        return False
    return True


_HAS_PIDFD = _has_pidfd()


@final
class PopenProcess(LocalProcess):
    """A re-run script."""

    def __init__(self, popen: subprocess.Popen[bytes], parent_pipe: ParentDeathPipe) -> None:
        self._popen = popen
        super().__init__(popen.pid, parent_pipe)

    def _reap(self) -> int | None:
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            status = None
        self._popen.returncode = 0 if status is None else status  # as subprocess does
        return status


@final
class MultiprocessingProcess(LocalProcess):
    """A process of the standard library's multiprocessing: spawned, forked, or forked by the forkserver."""

    def __init__(self, process: multiprocessing.process.BaseProcess, parent_pipe: ParentDeathPipe) -> None:
        self._process = process
        self._is_of_forkserver = isinstance(process, ForkServerProcess)
        if process.pid is None:
            raise ValueError(f"{process!r} has not been started")
        super().__init__(process.pid, parent_pipe)

    def _reap(self) -> int | None:
        if not _HAS_PIDFD:
            self._process.join()
        # A forkserver reports its child's status a moment after the pidfd is readable. If another thread
        # starts a process, multiprocessing reaps this one there, a moment before it records the status. If
        # SIGCHLD is ignored or handled, the kernel or the program's handler has taken the status.
        may_be_recorded = signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        limit_s = _RECORDING_TIMEOUT_S if may_be_recorded else 0.0
        deadline = time.monotonic() + (_REPORT_TIMEOUT_S if self._is_of_forkserver else limit_s)
        while (status := self._process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(_STATUS_POLL_S)
        if status is None:  # otherwise multiprocessing never releases it and its descriptors
            self._process._popen.returncode = 0  # type: ignore[attr-defined]  # typeshed leaves it out
        self._process.close()
        if status == _NO_FORKSERVER and self._is_of_forkserver and not _has_forkserver():
            return None
        return status


def _has_forkserver() -> bool:
    """Return whether multiprocessing's forkserver is still running."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    try:
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False

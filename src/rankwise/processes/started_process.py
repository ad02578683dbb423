"""`StartedProcess`: a process that was started here: pid, a descriptor for its end, exit status."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import final

from rankwise.processes.parent_death import ParentDeathPipe

_STATUS_TIMEOUT_S = 5.0
_STATUS_POLL_S = 0.001


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z, a debugger), and reacts to nothing but SIGKILL."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it is gone, or this is no Linux
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


class StartedProcess(ABC):
    """A process that was started here, and that ends with this one. No other process is ever signalled."""

    def __init__(self, pid: int, parent_pipe: ParentDeathPipe) -> None:
        self.pid = pid
        self.was_killed = False  # from here
        self._parent_pipe = parent_pipe
        try:
            parent_pipe.tie(pid)
            self._end_descriptor = self._open_end_descriptor()
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait()
            raise

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""
        return self._end_descriptor

    @abstractmethod
    def wait(self) -> int:
        """Reap the process, which has ended; return its exit status (negative: the signal)."""

    def kill(self) -> None:
        """Send SIGKILL, if the process is still the one that was started."""
        self.was_killed = True
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process is still the one that was started."""
        with suppress(ProcessLookupError):
            if _HAS_PIDFD:
                signal.pidfd_send_signal(self._end_descriptor, number)
            else:
                os.kill(self.pid, number)

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
            return _readable_descriptor()

    def _watch_in_thread(self) -> int:
        # Without pidfds (macOS) a thread waits for the process, then closes its end of a pipe.
        read_end, write_end = os.pipe()

        def watch() -> None:
            self.wait()
            os.close(write_end)

        threading.Thread(target=watch, name="rankwise-wait", daemon=True).start()
        return read_end


_HAS_PIDFD = "pidfd_open" in os.__dict__


@final
class PopenProcess(StartedProcess):
    """A re-run script."""

    def __init__(self, popen: subprocess.Popen[bytes], parent_pipe: ParentDeathPipe) -> None:
        self._popen = popen
        super().__init__(popen.pid, parent_pipe)

    def wait(self) -> int:
        """Reap the process; return its exit status."""
        return self._popen.wait()


@final
class MultiprocessingProcess(StartedProcess):
    """A process of the standard library's multiprocessing: spawned, forked, or forked by the forkserver."""

    def __init__(self, process: multiprocessing.process.BaseProcess, parent_pipe: ParentDeathPipe) -> None:
        self._process = process
        if process.pid is None:
            raise ValueError(f"{process!r} has not been started")
        super().__init__(process.pid, parent_pipe)

    def wait(self) -> int:
        """Reap the process; return its exit status."""
        # A forkserver reports its child's status a moment after the pidfd is readable. Another thread that
        # starts a process reaps ours, inside multiprocessing, a moment before it records the status.
        self._process.join(_STATUS_TIMEOUT_S if _HAS_PIDFD else None)
        deadline = time.monotonic() + _STATUS_TIMEOUT_S
        while self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(_STATUS_POLL_S)
        status = self._process.exitcode
        if status is None:
            return 255
        self._process.close()
        return status


def _readable_descriptor() -> int:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end

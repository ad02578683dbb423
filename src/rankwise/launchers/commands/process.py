"""`SupervisedCommand`: a rank's process that the user's function has started, for the supervisor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol, final

from rankwise.errors import text_of
from rankwise.processes.exit_codes import write_stderr
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.started_process import StartedProcess

_SETTLE_S = 5.0  # between the end of a rank's connection and the return of its `wait`, whichever is first
_GIVE_UP_S = 10.0  # between `kill` and the return of `wait`


class CommandProcess(Protocol):
    """What a function that starts a rank returns; `subprocess.Popen` is one."""

    def wait(self) -> int | None:
        """Wait until the process has ended; return its exit code, -n for signal n, or None if unknown."""

    def kill(self) -> None:
        """End the process, if it still runs."""


@final
class SupervisedCommand(StartedProcess):
    """A rank's process, which has ended when its `wait` has returned and its channel is read to the end."""

    is_here = False

    def __init__(self, global_rank: int, parent_pipe: ParentDeathPipe, on_kill: Callable[[], None]) -> None:
        self.pid = 0
        self.is_connected = False  # whether the rank has connected its channel
        self._global_rank = global_rank
        self._parent_pipe = parent_pipe
        self._on_kill = on_kill
        self._has_returned, self._is_drained = threading.Event(), threading.Event()
        self._ending = threading.Lock()
        self._read_end = self._write_end = -1
        self._status: int | None = None

    def watch(self, process: CommandProcess) -> None:
        """Wait, in a thread, for the end of the process that was started."""
        self._process = process
        self._read_end, self._write_end = os.pipe()
        threading.Thread(target=self._wait, name="rankwise-wait", daemon=True).start()

    def _wait(self) -> None:
        status = None
        try:
            status = self._process.wait()
        except Exception as error:  # noqa: BLE001  the user's code
            self._report(f"wait() raised {type(error).__name__}: {text_of(error)}")
        self._has_returned.set()
        if self.is_connected and not self._is_drained.wait(_SETTLE_S):
            self._on_kill()  # what runs there is no longer supervised
        self._end(status)

    def _end(self, status: int | None) -> None:
        with self._ending:
            if self._write_end >= 0:
                self._status = status
                os.write(self._write_end, b"\0")  # closing is not enough: see `LocalProcess`
                os.close(self._write_end)
                self._write_end = -1

    def wait_after_channel(self) -> None:
        """Wait a little for the end of the process, as its channel has been read to the end."""
        self._is_drained.set()
        self._has_returned.wait(_SETTLE_S)

    def fileno(self) -> int:
        return self._read_end

    def wait(self) -> int | None:
        return self._status

    def has_memory(self) -> bool:
        return not self._has_returned.is_set()

    def kill(self) -> None:
        """Close the rank's lifeline, and call the `kill` of the user's process in a thread."""
        if not self.was_killed:
            self.was_killed = True
            self._on_kill()
            threading.Thread(target=self._kill, name="rankwise-kill", daemon=True).start()

    def _kill(self) -> None:
        try:
            self._process.kill()
        except Exception as error:  # noqa: BLE001  the user's code
            self._report(f"kill() raised {type(error).__name__}: {text_of(error)}")
        if not self._has_returned.wait(_GIVE_UP_S):
            self._report(f"wait() has not returned {_GIVE_UP_S:g} s after kill(); nobody waits for it now")
            self._end(None)

    def _report(self, text: str) -> None:
        write_stderr(f"rankwise: the process of global_rank={self._global_rank}: {text}.\n")

    def close(self) -> None:
        self._end(None)
        os.close(self._read_end)
        self._parent_pipe.close()

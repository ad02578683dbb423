"""A lifeline: the kernel ends a worker whose launching process is gone, whatever it is doing.

A worker leaves by itself when its channel ends. It cannot while it starts, as its first seconds go into
importing torch before it reaches rankwise, nor while C code holds the interpreter's lock. So the launching
process also holds the one end of a pipe, and asks for a SIGKILL to the worker when that end is closed.
Source: fcntl(2), F_SETSIG and F_SETOWN.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from contextlib import suppress

from typing_extensions import final

from rankwise.launchers import _at_fork

__all__ = ["Lifeline"]

_IS_LINUX = sys.platform == "linux"


@final
class Lifeline:
    """One worker's. On Linux alone; elsewhere it does nothing.

    Attributes:
        worker_end: the descriptor that the worker must inherit; it need not know what for.
    """

    def __init__(self) -> None:
        self.worker_end, own_end = os.pipe()
        self._own_end = os.fdopen(own_end, "wb", buffering=0)
        _at_fork.close_in_child(self._own_end)
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
        _at_fork.forget(self._own_end)
        self._own_end.close()

"""Make the main thread leave whatever it is doing: a real-time signal whose handler raises, once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from typing_extensions import Self, final

_FIRST_DELAY_S = 0.05
_REPEAT_S = 0.05


@final
class JobStopped(BaseException):
    """Raised in the main thread of a rank that the supervisor told to leave; `finally` blocks run."""


@final
class Interruptible:
    """A block of the main thread that `interrupt` can make leave, from another thread.

    Outside the main thread (where Python delivers no signals) the block runs, but cannot be interrupted.
    Mutates: the handler of one free real-time signal, restored on exit.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._left = threading.Event()
        self._raised = False
        self._thread_id = threading.get_ident()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._signal = _free_signal()
        if self._signal is not None:
            signal.signal(self._signal, self._raise)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._left.set()
        if self._signal is not None:
            # ignored first: a signal that is under way must not meet the default action: it ends the process
            signal.signal(self._signal, signal.SIG_IGN)
            signal.signal(self._signal, signal.SIG_DFL)

    def interrupt(self) -> None:
        """Wake the block and go on waking it until it has left. Runs on: a thread of the channel."""
        delay = _FIRST_DELAY_S
        while not self._left.wait(delay):
            if self._signal is None or self._raised:
                return
            signal.pthread_kill(self._thread_id, self._signal)
            delay = _REPEAT_S

    def _raise(self, signum: int, interrupted: FrameType | None) -> None:
        is_cleaning_up = sys.exc_info()[0] is not None  # in an `except` or `finally` block
        is_lost = _in_finalizer(interrupted)  # an exception in a __del__ goes nowhere
        if self._left.is_set() or self._raised or is_cleaning_up or is_lost:
            return
        self._raised = True
        raise JobStopped


def _free_signal() -> int | None:
    if "SIGRTMIN" in signal.__dict__:
        candidates = range(int(signal.SIGRTMIN), int(signal.SIGRTMAX) + 1)
    else:  # macOS has no real-time signals
        candidates = range(int(signal.SIGUSR1), int(signal.SIGUSR2) + 1)
    return next((number for number in candidates if signal.getsignal(number) is signal.SIG_DFL), None)


def _in_finalizer(current: FrameType | None) -> bool:
    while current is not None:
        if current.f_code.co_name == "__del__":
            return True
        current = current.f_back
    return False

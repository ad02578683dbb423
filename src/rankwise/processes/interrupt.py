"""Make the main thread leave whatever it is doing: a real-time signal whose handler raises."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from types import FrameType
from typing import final

from typing_extensions import Self

_FIRST_DELAY_S = 0.05
_REPEAT_S = 0.05
# So long after it was raised the exception is taken for lost: swallowed by an `except:`, or raised where
# Python ignores exceptions (a weak reference's callback).
_LOST_S = 1.0


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
        self._lock = threading.Lock()  # held while a signal is sent, and to leave
        self._left = threading.Event()
        self._is_leaving = False
        self._raised_s = -math.inf
        self._handled_before: BaseException | None = None
        self._thread_id = threading.get_ident()

    def __enter__(self) -> Self:
        # The caller may be in an `except` or `finally` block; so is, without knowing, what it forks there.
        self._handled_before = sys.exc_info()[1]
        if threading.current_thread() is threading.main_thread():
            self._signal = _free_signal()
        if self._signal is not None:
            signal.signal(self._signal, self._raise)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_leaving = True
        self._handled_before = None  # its frames hold whatever the caller has
        with self._lock:
            self._left.set()
        if self._signal is not None:
            # ignored first: a signal that is under way must not meet the default action: it ends the process
            signal.signal(self._signal, signal.SIG_IGN)
            signal.signal(self._signal, signal.SIG_DFL)

    def interrupt(self) -> None:
        """Wake the block and go on waking it until it has left. Runs on: a thread of the channel."""
        if self._signal is None:
            return
        delay = _FIRST_DELAY_S
        while not self._left.wait(delay):
            self._send(self._signal)
            delay = _REPEAT_S if self._raised_s == -math.inf else _LOST_S

    def _send(self, number: int) -> None:
        with self._lock:
            if not self._left.is_set():
                signal.pthread_kill(self._thread_id, number)

    def _raise(self, signum: int, interrupted: FrameType | None) -> None:
        has_just_raised = time.monotonic() - self._raised_s < _LOST_S
        if self._is_leaving or has_just_raised or self._is_to_be_spared(interrupted):
            return
        self._raised_s = time.monotonic()
        raise JobStopped

    def _is_to_be_spared(self, interrupted: FrameType | None) -> bool:
        if interrupted is not None and interrupted.f_code is Interruptible.__exit__.__code__:
            return True  # at its very first instruction
        is_cleaning_up = sys.exc_info()[1] is not self._handled_before  # in an `except` or `finally` block
        return is_cleaning_up or _in_finalizer(interrupted)  # an exception in a __del__ goes nowhere


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

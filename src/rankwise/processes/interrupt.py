"""Interrupt the main thread: a real-time signal whose handler raises."""

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
# After this time the exception counts as lost: caught by an `except:`, or raised where Python ignores
# exceptions (a weak reference's callback).
_LOST_S = 1.0


@final
class JobStopped(BaseException):
    """Raised in the main thread of a rank after STOP from the supervisor; `finally` blocks run."""


@final
class Interruptible:
    """A block of the main thread that another thread can end, by `interrupt`.

    Outside the main thread, where Python runs no signal handlers, the block cannot be interrupted.
    Mutates: the handler of one free real-time signal, restored on exit.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._lock = threading.Lock()  # held while a signal is sent, and at the end of the block
        self._left = threading.Event()
        self._is_leaving = False
        self._raised_s = -math.inf
        self._handled_before: BaseException | None = None
        self._thread_id = threading.get_ident()

    def __enter__(self) -> Self:
        # The caller, or the process that has forked this one, may be in an `except` or `finally` block.
        self._handled_before = sys.exc_info()[1]
        if threading.current_thread() is threading.main_thread():
            self._signal = _free_signal()
        if self._signal is not None:
            signal.signal(self._signal, self._raise)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_leaving = True
        self._handled_before = None  # its frames keep the caller's objects alive
        with self._lock:
            self._left.set()
        if self._signal is not None:
            # Ignored first: the default action for a signal that is under way would end the process.
            signal.signal(self._signal, signal.SIG_IGN)
            signal.signal(self._signal, signal.SIG_DFL)

    def interrupt(self) -> None:
        """Raise in the block, again and again until it has ended. Runs on: another thread."""
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
        if self._is_leaving or has_just_raised or self._must_not_raise(interrupted):
            return
        self._raised_s = time.monotonic()
        __tracebackhide__ = True  # from pytest's reports, which end where the rank was stopped
        raise JobStopped

    def _must_not_raise(self, interrupted: FrameType | None) -> bool:
        if interrupted is not None and interrupted.f_code is Interruptible.__exit__.__code__:
            return True  # at its very first instruction
        is_cleaning_up = sys.exc_info()[1] is not self._handled_before  # in an `except` or `finally` block
        return is_cleaning_up or _in_finalizer(interrupted)  # Python ignores an exception in a __del__


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

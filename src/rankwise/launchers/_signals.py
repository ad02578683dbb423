"""Ctrl-C belongs to the main process: its workers are started deaf to it, and stay so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start processes within this block: they begin with SIGINT blocked, before they have a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts_to_the_main_process() -> None:
    """Do nothing on SIGINT from here on, in this worker.

    A handler, not SIG_IGN: what the worker executes in its turn must not inherit the deafness.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _nothing(signum: int, interrupted: FrameType | None) -> None:
    pass

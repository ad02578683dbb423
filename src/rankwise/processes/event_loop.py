"""Wake-up descriptor and timers of an event loop."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol, final

from rankwise.processes import fork_safety
from rankwise.processes.signals import SignalDebouncer, handling

_CHUNK = 1 << 16


@final
class Wakeup:
    """A descriptor that becomes readable when there is a wish to fulfil, or this process caught a signal.

    Args:
        ending: the signals that end a job, or make it stop.
        heard: one that does neither.
    """

    def __init__(self, ending: Iterable[int], heard: int) -> None:
        self._shutdown = tuple(ending)
        self._heard = heard
        self._debouncer = SignalDebouncer()
        self._wishes: deque[Callable[[], None]] = deque()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._next_descriptor = -1
        self._last_signal: int | None = None
        fork_safety.close_in_child(self._read, self._write)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._read.fileno()

    def call_soon(self, call_soon: Callable[[], None]) -> None:
        """Have something done by the supervisor's thread."""
        self._wishes.append(call_soon)
        self._wake()

    def run_pending(self, on_signals: Callable[[bytes], None]) -> None:
        """Call `on_signals` with the numbers of the signals that were caught, then do what was wished for.

        Of signals that end a job, those that are but echoes of the first are left out.

        In this order, and no wish that is newer than what was read: a wish may be what a signal has led to.
        """
        waiting = len(self._wishes)
        numbers = self._read.recv(_CHUNK).replace(b"\0", b"")
        if numbers and self._next_descriptor >= 0:
            os.write(self._next_descriptor, numbers)
        on_signals(bytes(number for number in numbers if not self._is_repeat(number)))
        for _ in range(waiting):
            self._wishes.popleft()()
        if self._wishes:
            self._wake()

    def _is_repeat(self, number: int) -> bool:
        return number in self._shutdown and self._debouncer.is_propagated()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: the thread is about to look anyway
            self._write.send(b"\0")

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Be woken by every signal, also while the main thread is in a C call, where no handler runs.

        Mutates: the process's signal wake-up descriptor, and the handlers of the signals that would end the
        process; restored on exit.

        Raises:
            SystemExit: on exit, when one of these came and nothing else was raised because of it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._next_descriptor = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._last_signal = None
        try:
            with handling(self._shutdown, self._note), handling([self._heard]):
                yield
        finally:
            signal.set_wakeup_fd(self._next_descriptor)
            self._next_descriptor = -1
        if self._last_signal is not None:
            raise SystemExit(128 + self._last_signal)

    def close(self) -> None:
        """Close the descriptor; nobody may wish any more."""
        fork_safety.forget(self._read, self._write)
        self._read.close()
        self._write.close()

    def _note(self, signum: int, interrupted: FrameType | None) -> None:
        self._last_signal = signum


class Watch(Protocol):
    """Something that looks at the ranks now and then."""

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for never."""

    def look(self) -> None:
        """Look, if it is time to."""


@final
class Timers:
    """One deadline, which replaces the one before, and the looks of some watches."""

    def __init__(self, *watches: Watch) -> None:
        self._watches = watches
        self._deadline: tuple[float, Callable[[], None]] | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a deadline."""
        return self._deadline is not None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something so many seconds from now, instead of what was to be done before."""
        self._deadline = (time.monotonic() + seconds, action)

    def clear(self) -> None:
        """Forget the deadline."""
        self._deadline = None

    def time_left(self) -> float | None:
        """Return the seconds until something is due; None for never."""
        times = [left for watch in self._watches if (left := watch.time_left()) is not None]
        if self._deadline is not None:
            times.append(max(0.0, self._deadline[0] - time.monotonic()))
        return min(times, default=None)

    def run(self) -> None:
        """Do what is due."""
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            action = self._deadline[1]
            self._deadline = None
            action()
        for watch in self._watches:
            watch.look()

"""How other threads, and signals, reach the supervisor's thread while it waits on its descriptors."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from typing_extensions import final

from rankwise.launchers import _at_fork
from rankwise.launchers._signals import Echoes, handled

_CHUNK = 1 << 16


@final
class Wakeup:
    """A descriptor that becomes readable when there is a wish to fulfil, or this process caught a signal.

    Args:
        ending: the signals that end a job, or make it stop.
        heard: one that does neither.
    """

    def __init__(self, ending: Iterable[int], heard: int) -> None:
        self._ending = tuple(ending)
        self._heard = heard
        self._echoes = Echoes()
        self._wishes: deque[Callable[[], None]] = deque()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._next_descriptor = -1
        self._last_signal: int | None = None
        _at_fork.close_in_child(self._read, self._write)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._read.fileno()

    def wish(self, wish: Callable[[], None]) -> None:
        """Have something done by the supervisor's thread."""
        self._wishes.append(wish)
        self._wake()

    def fulfil(self, on_signals: Callable[[bytes], None]) -> None:
        """Call `on_signals` with the numbers of the signals that were caught, then do what was wished for.

        Of signals that end a job, those that are but echoes of the first are left out.

        In this order, and no wish that is newer than what was read: a wish may be what a signal has led to.
        """
        waiting = len(self._wishes)
        numbers = self._read.recv(_CHUNK).replace(b"\0", b"")
        if numbers and self._next_descriptor >= 0:
            os.write(self._next_descriptor, numbers)
        on_signals(bytes(number for number in numbers if not self._is_echo(number)))
        for _ in range(waiting):
            self._wishes.popleft()()
        if self._wishes:
            self._wake()

    def _is_echo(self, number: int) -> bool:
        return number in self._ending and self._echoes.is_echo()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: the thread is about to look anyway
            self._write.send(b"\0")

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
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
            with handled(self._ending, self._note), handled([self._heard]):
                yield
        finally:
            signal.set_wakeup_fd(self._next_descriptor)
            self._next_descriptor = -1
        if self._last_signal is not None:
            raise SystemExit(128 + self._last_signal)

    def close(self) -> None:
        """Close the descriptor; nobody may wish any more."""
        _at_fork.forget(self._read, self._write)
        self._read.close()
        self._write.close()

    def _note(self, signum: int, interrupted: FrameType | None) -> None:
        self._last_signal = signum

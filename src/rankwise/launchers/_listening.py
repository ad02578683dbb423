"""Hear a signal in a thread, and end by one: also while the main thread is in C++, where no handler runs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable

from typing_extensions import Self, final

from rankwise.launchers import _at_fork

_CHUNK = 1 << 12
_LEAVE = b"\0"


@final
class Listening:
    """A block in which a thread hears of a signal at once, whatever the main thread does.

    The signal must have a handler in the block, which asks `hears` whether the thread has heard of it, too.

    Mutates: the process's signal wake-up descriptor where nobody has set one; restored on exit.
    Runs on: the main thread, but `hear`.

    Args:
        number: of the signal.
        hear: called for each, in the thread.
    """

    def __init__(self, number: int, hear: Callable[[], None]) -> None:
        self._number = number
        self._hear = hear

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(True)  # whatever the user's default timeout for sockets is
        self._write.setblocking(False)
        _at_fork.close_in_child(self._read, self._write)
        self._thread = threading.Thread(target=self._listen, name="rankwise-signals", daemon=True)
        self._thread.start()
        self.hears()
        return self

    def __exit__(self, *exc_info: object) -> None:
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor != self._write.fileno():
            signal.set_wakeup_fd(descriptor)
        if self._write.fileno() < 0:
            return  # a forked process leaves the block, too
        self._write.setblocking(True)
        self._write.send(_LEAVE)  # no end of file: a forked process may still hold this end
        self._thread.join()
        _at_fork.forget(self._read, self._write)
        self._read.close()
        self._write.close()

    def hears(self) -> bool:
        """Return whether the thread has heard of the signal that is being handled.

        Not where something else, like an event loop, is woken in its stead; once that has left, it hears of
        the next one.
        """
        mine = self._write.fileno()
        descriptor = signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
        if descriptor not in (-1, mine):
            signal.set_wakeup_fd(descriptor)
        return descriptor == mine

    def _listen(self) -> None:
        while True:
            for number in self._read.recv(_CHUNK):
                if number == _LEAVE[0]:
                    return
                if number == self._number:
                    self._hear()


def end_by(number: int) -> None:
    """End this process by a signal, whatever handles it. Runs on: any thread, unlike `signal.signal`."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)

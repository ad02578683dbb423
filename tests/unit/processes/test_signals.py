"""A thread hears of signals, unless something else is woken in its stead."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType

from rankwise.processes.signals import SignalThread, handling


class Heard:
    """Who has heard of a signal that this process sends itself."""

    def __init__(self) -> None:
        self.listening = SignalThread(signal.SIGUSR1, self._in_thread)
        self._is_heard = threading.Event()
        self._names: list[str] = []

    def by(self) -> list[str]:
        """Send it; return the names of the threads that heard of it."""
        self._names.clear()
        self._is_heard.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert self._is_heard.wait(10)
        return self._names

    def _in_thread(self) -> None:
        self._names.append(threading.current_thread().name)
        self._is_heard.set()

    def catch(self, signum: int, interrupted: FrameType | None) -> None:
        """Handle it."""
        if not self.listening.hears():
            self._in_thread()


def test_the_thread_hears() -> None:
    """It, and not the handler; after the block all is as it was."""
    heard = Heard()
    with heard.listening, handling([signal.SIGUSR1], heard.catch):
        assert heard.by() == ["rankwise-signals"]
        assert heard.by() == ["rankwise-signals"]
    assert signal.set_wakeup_fd(-1) == -1


def test_an_event_loop_that_is_woken() -> None:
    """It is left alone: the handler serves until it has gone, as it takes no heed of who was there before."""
    heard = Heard()
    mine, its = socket.socketpair()
    with mine, its, heard.listening, handling([signal.SIGUSR1], heard.catch):
        its.setblocking(False)
        signal.set_wakeup_fd(its.fileno())
        assert heard.by() == ["MainThread"]
        assert mine.recv(10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(-1) == its.fileno()
        assert heard.by() == ["MainThread"]
        assert heard.by() == ["rankwise-signals"]


def test_one_that_was_there_before() -> None:
    """It stays."""
    heard = Heard()
    mine, its = socket.socketpair()
    with mine, its:
        its.setblocking(False)
        signal.set_wakeup_fd(its.fileno())
        with heard.listening, handling([signal.SIGUSR1], heard.catch):
            assert heard.by() == ["MainThread"]
        assert signal.set_wakeup_fd(-1) == its.fileno()

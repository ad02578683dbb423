"""What an event loop calls, in which thread and order."""

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.processes.event_loop import WRITE, EventLoop
from rankwise.processes.signals import ROUTER
from tests.helpers.own_process import few_files

LIMIT_S = 10


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    """Return a loop that runs in a thread."""
    made = EventLoop()
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(LIMIT_S)
    made.close()


@pytest.mark.parametrize("spare", range(5))
def test_too_few_files(spare: int) -> None:
    """What could be opened is closed at once, and no reader of signals is counted."""
    gc.disable()
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        with few_files(spare), pytest.raises(OSError, match="Too many open files"):
            EventLoop()
    finally:
        gc.enable()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not ROUTER.has_reader


def test_calls_are_made_in_order(loop: EventLoop) -> None:
    """All in the loop's thread, where `call_now` does not wait for its turn."""
    called: list[str] = []
    is_done = threading.Event()

    def first() -> None:
        loop.call_soon(lambda: called.append("third"))
        loop.call_now(lambda: called.append("first"))

    loop.call_soon(first)
    loop.call_now(lambda: called.append("second"))
    loop.call_soon(lambda: loop.call_soon(is_done.set))
    assert is_done.wait(LIMIT_S)
    assert called in (["first", "second", "third"], ["first", "third", "second"])


def test_a_later_deadline_replaces_an_earlier_one(loop: EventLoop) -> None:
    """Only the last call is made, once."""
    called: list[str] = []
    is_done = threading.Event()

    def set_deadlines() -> None:
        loop.call_later(0.01, lambda: called.append("replaced"))
        loop.call_later(0.02, is_done.set)

    loop.call_soon(set_deadlines)
    assert is_done.wait(LIMIT_S)
    assert called == []
    assert not loop.has_deadline


def test_a_loop_is_freed_at_once() -> None:
    """Neither it nor the call of a deadline that has passed waits for garbage collection."""
    loop, event = EventLoop(), threading.Event()
    freed = weakref.ref(loop), weakref.ref(event)
    loop.call_later(0, event.set)
    loop.call_soon(loop.stop)
    loop.run()
    del event
    assert freed[1]() is None
    loop.close()
    del loop
    assert freed[0]() is None


def test_descriptors(loop: EventLoop) -> None:
    """A readable one calls back, a writable one where that was asked for, until it is unregistered."""
    mine, other = socket.socketpair()
    is_readable, is_writable = threading.Event(), threading.Event()

    def on_event(events: int) -> None:
        if events & WRITE:
            is_writable.set()
            loop.wait_writable(mine, until_writable=False)
        else:
            mine.recv(10)
            loop.wait_writable(mine, until_writable=True)
            is_readable.set()

    with mine, other:
        loop.call_soon(lambda: loop.register(mine, on_event))
        other.send(b"1")
        assert is_readable.wait(LIMIT_S)
        assert is_writable.wait(LIMIT_S)
        is_unregistered = threading.Event()
        loop.call_soon(lambda: loop.unregister(mine))
        loop.call_soon(is_unregistered.set)
        assert is_unregistered.wait(LIMIT_S)
        is_readable.clear()
        other.send(b"2")
        assert not is_readable.wait(0.05)


def test_calls_in_intervals(loop: EventLoop) -> None:
    """The loop wakes up for them by itself."""
    called: list[float] = []
    is_done = threading.Event()

    def call() -> None:
        called.append(time.monotonic())
        if len(called) == 3:
            is_done.set()

    began_s = time.monotonic()
    loop.call_soon(lambda: loop.call_every(0.01, call))
    loop.call_soon(lambda: loop.call_every(1e9, is_done.set))  # more than the system call takes
    assert is_done.wait(LIMIT_S)
    assert called[2] - began_s >= 0.03

"""Making the main thread leave: wherever it is, unless it cleans up, and never after it has left."""

import contextlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankwise.processes import signals
from rankwise.processes.signals import Interruptible, JobStopped

LONG_S = 60.0


@contextlib.contextmanager
def interrupted() -> Iterator[Callable[[], None]]:
    """Run a block that another thread wants to leave once it calls what it gets, and see that it ends so."""
    began_s = time.monotonic()
    may_interrupt = threading.Event()
    with pytest.raises(JobStopped), Interruptible() as block:

        def cut() -> None:
            may_interrupt.wait(LONG_S)
            block.interrupt()

        thread = threading.Thread(target=cut)
        thread.start()
        yield may_interrupt.set
    thread.join()
    assert time.monotonic() - began_s < LONG_S


def test_a_sleep_is_left() -> None:
    """The main thread leaves what it waits in, also in an `except` block, where the caller tries again."""
    with interrupted() as cut:
        cut()
        time.sleep(LONG_S)
    try:
        raise MemoryError
    except MemoryError:
        with interrupted() as cut:
            cut()
            time.sleep(LONG_S)


def test_a_finally_block_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaning up is not disturbed, however long it takes."""
    monkeypatch.setattr(signals, "_LOST_S", 0.1)
    is_clean = False
    with interrupted() as cut:
        try:
            cut()
            time.sleep(LONG_S)
        finally:
            time.sleep(0.4)
            is_clean = True
    assert is_clean


def test_an_exception_that_was_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a bare `except:` nor a weak reference's callback makes the main thread deaf."""
    monkeypatch.setattr(signals, "_LOST_S", 0.1)
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    class Target:
        pass

    with interrupted() as cut:
        with contextlib.suppress(BaseException):
            cut()
            time.sleep(LONG_S)
        target: Any = Target()
        reference = weakref.ref(target, lambda _: time.sleep(LONG_S))
        del target
        assert reference() is None
        assert lost
        time.sleep(LONG_S)


def test_nothing_is_sent_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is about to send its signal holds up the end, or finds that it has come."""
    met: list[Any] = []
    is_about_to_send = threading.Event()

    def send_slowly(thread_id: int, number: int) -> None:
        is_about_to_send.set()
        time.sleep(0.2)
        met.append(signal.getsignal(number))

    monkeypatch.setattr(signal, "pthread_kill", send_slowly)
    with Interruptible() as block:
        thread = threading.Thread(target=block.interrupt)
        thread.start()
        assert is_about_to_send.wait(LONG_S)
    thread.join()
    assert met
    assert signal.SIG_DFL not in met

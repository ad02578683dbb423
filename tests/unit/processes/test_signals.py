"""The signal router: who is called for a signal, in which thread, how often."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from rankwise.processes.event_loop import signals_delivered_in_thread
from rankwise.processes.signals import ROUTER, SignalRequest, _free_signal
from tests.helpers.own_process import signal_handled

NUMBER = signal.SIGUSR1
LIMIT_S = 10


class Subscriber:
    """Keeps the requests that it is called with, and the threads."""

    def __init__(self) -> None:
        self.repeats: list[bool] = []
        self.threads: list[str] = []
        self.is_called = threading.Event()

    def __call__(self, request: SignalRequest) -> None:
        assert request.number == NUMBER
        self.repeats.append(request.is_repeat)
        self.threads.append(threading.current_thread().name)
        self.is_called.set()


def send() -> None:
    os.kill(os.getpid(), NUMBER)


@pytest.fixture
def subscriber() -> Subscriber:
    return Subscriber()


def test_a_subscriber_is_called_once(subscriber: Subscriber) -> None:
    """Without an event loop the main thread delivers; afterwards handler and descriptor are as before."""
    before = signal.getsignal(NUMBER)
    with ROUTER.subscribe([NUMBER], subscriber):
        send()
        assert subscriber.threads == ["MainThread"]
    assert signal.getsignal(NUMBER) is before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("calls_earlier_handler", [True, False])
def test_the_handler_that_was_set_before(subscriber: Subscriber, calls_earlier_handler: bool) -> None:
    """It is called after the subscribers, repeats included, unless the subscription replaces it."""
    numbers: list[int] = []
    with (
        signal_handled(NUMBER, lambda number, frame: numbers.append(number)),
        ROUTER.subscribe([NUMBER], subscriber, calls_earlier_handler=calls_earlier_handler),
    ):
        send()
        send()
    assert subscriber.repeats == [False, True]
    assert numbers == ([NUMBER, NUMBER] if calls_earlier_handler else [])


def test_a_repeat_is_the_same_request(subscriber: Subscriber) -> None:
    """All subscribers are called with both, the second one marked; observers do not count."""
    other, observer = Subscriber(), Subscriber()
    with ROUTER.subscribe([NUMBER], observer, is_debounced=False):
        send()
        with ROUTER.subscribe([NUMBER], subscriber), ROUTER.subscribe([NUMBER], other):
            send()
            send()
    assert subscriber.repeats == other.repeats == [False, True]
    assert observer.repeats == [False, False, False]


def test_the_handler_of_before_is_called_too(subscriber: Subscriber) -> None:
    """Once, whatever the number of subscribers."""
    called: list[int] = []
    with (
        signal_handled(NUMBER, lambda number, frame: called.append(number)),
        ROUTER.subscribe([NUMBER], subscriber),
        ROUTER.subscribe([NUMBER], Subscriber()),
    ):
        send()
    assert called == [NUMBER]
    assert len(subscriber.repeats) == 1


def test_the_thread_delivers_while_main_is_blocked(subscriber: Subscriber) -> None:
    """Where the main thread runs no handler, the event loop calls the subscriber from its thread."""

    def send_and_wait() -> None:
        time.sleep(0.3)  # the main thread is in `join` by then
        send()
        subscriber.is_called.wait(LIMIT_S)

    with signals_delivered_in_thread(), ROUTER.subscribe([NUMBER], subscriber):
        signal.pthread_sigmask(signal.SIG_BLOCK, {NUMBER})
        sender = threading.Thread(target=send_and_wait)
        sender.start()
        sender.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NUMBER})
    assert subscriber.threads == ["rankwise-signals"]


def test_a_subscriber_of_the_main_thread_may_raise(subscriber: Subscriber) -> None:
    """It is called there alone, also where an event loop has read the signal."""

    def stop(request: SignalRequest) -> None:
        raise KeyError(request.number)

    with (
        signals_delivered_in_thread(),
        pytest.raises(KeyError),
        ROUTER.subscribe([NUMBER], subscriber),
        ROUTER.subscribe([NUMBER], stop, in_main_thread=True),
    ):
        send()
        threading.Event().wait(LIMIT_S)
    assert len(subscriber.repeats) == 1


def test_the_default_action_is_replaced(subscriber: Subscriber) -> None:
    """Where nobody else handles the signal."""
    other = Subscriber()
    with ROUTER.subscribe([NUMBER], subscriber, is_default_action=True):
        send()
        with ROUTER.subscribe([NUMBER], other):
            send()
        signal.signal(NUMBER, lambda number, frame: None)
        send()
    assert len(subscriber.repeats) == 1
    assert len(other.repeats) == 1


def test_an_event_loop_that_takes_the_descriptor(subscriber: Subscriber) -> None:
    """It is left alone: the handler delivers until the other loop resets the descriptor."""
    mine, its = socket.socketpair()
    with mine, its, ROUTER.subscribe([NUMBER], subscriber):
        its.setblocking(False)
        ours = signal.set_wakeup_fd(its.fileno())
        send()
        assert mine.recv(10) == bytes([NUMBER])
        assert signal.set_wakeup_fd(-1) == its.fileno()
        send()
        assert signal.set_wakeup_fd(ours) == ours
        send()
        assert len(subscriber.repeats) == 3


def test_a_descriptor_of_before(subscriber: Subscriber) -> None:
    """The numbers are forwarded to it, and it is restored."""
    mine, its = socket.socketpair()
    with mine, its:
        its.setblocking(False)
        signal.set_wakeup_fd(its.fileno())
        with ROUTER.subscribe([NUMBER], subscriber):
            send()
            assert len(subscriber.repeats) == 1
            assert mine.recv(10) == bytes([NUMBER])
        assert signal.set_wakeup_fd(-1) == its.fileno()


def test_a_forked_process_has_no_subscribers(subscriber: Subscriber) -> None:
    """It starts with the handlers of before, also when it leaves the block."""
    called: list[int] = []

    def work() -> None:
        assert signal.set_wakeup_fd(-1) == -1  # else its signals would wake the parent
        send()
        with ROUTER.subscribe([NUMBER], subscriber):
            send()
        assert called == [NUMBER, NUMBER]
        assert len(subscriber.repeats) == 1
        assert not ROUTER.has_reader

    with (
        signal_handled(NUMBER, lambda number, frame: called.append(number)),
        signals_delivered_in_thread(),
        ROUTER.subscribe([NUMBER], subscriber),
    ):
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(LIMIT_S)
    assert process.exitcode == 0
    assert called == []


def test_no_signal_is_free() -> None:
    """A program that handles all real-time signals leaves none for waking the main thread."""
    assert _free_signal() == signal.SIGRTMIN
    with ExitStack() as stack:
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            stack.enter_context(signal_handled(number, lambda *_: None))
        assert _free_signal() is None

"""`EventLoop`: one thread that waits on descriptors, timers, calls from other threads, and signals."""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

from rankwise.processes import fork_safety
from rankwise.processes.signals import ROUTER

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_CHUNK = 1 << 12
_LONGEST_WAIT_S = 86400.0  # the system call takes 24 days at most


@dataclass
class _Timer:
    due_s: float
    interval_s: float
    call: Callable[[], None]


@final
class EventLoop:
    """Call back in the thread that runs `run`; deliver signals there while the main thread is blocked."""

    def __init__(self) -> None:
        self._timers: list[_Timer] = []
        self._deadline: tuple[float, Callable[[], None]] | None = None  # when to call what
        self._pending: deque[Callable[[], None]] = deque()
        self._is_running = True
        self._thread_id: int | None = None
        with ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._wakeup, self._wake = map(opened.enter_context, socket.socketpair())
            signals = ROUTER.open_reader()
            opened.callback(ROUTER.close_reader, signals)
            self._wakeup.setblocking(False)
            self._wake.setblocking(False)
            self._selector.register(self._wakeup, READ)
            self._selector.register(signals, READ)
            self._opened = opened.pop_all()
        fork_safety.close_in_child(self._selector, self._wakeup, self._wake)

    def register(self, file: Any, callback: Callable[[int], None]) -> None:
        """Call `callback` with the events whenever a descriptor is readable, until `unregister`."""
        self._selector.register(file, READ, callback)

    def unregister(self, file: Any) -> None:
        """Stop waiting for a descriptor, if it is registered."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def wait_writable(self, file: Any, until_writable: bool) -> None:
        """Call back also when a registered descriptor is writable, or stop doing so."""
        events = READ | (WRITE if until_writable else 0)
        self._selector.modify(file, events, self._selector.get_key(file).data)

    @property
    def has_deadline(self) -> bool:
        """Whether a call of `call_later` is to come."""
        return self._deadline is not None

    def call_every(self, interval_s: float, call: Callable[[], None]) -> None:
        """Call in intervals, late where the process was suspended; never, if the interval is infinite."""
        if interval_s != math.inf:
            self._timers.append(_Timer(time.monotonic() + interval_s, interval_s, call))

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds, in place of what an earlier `call_later` would call."""
        self._deadline = time.monotonic() + seconds, call

    def cancel_deadline(self) -> None:
        """Do not make the call of `call_later`."""
        self._deadline = None

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread. Runs on: any thread."""
        self._pending.append(call)
        self._wake_up()

    def call_now(self, call: Callable[[], None]) -> None:
        """Call at once in the loop's thread; soon from any other thread."""
        if threading.get_ident() == self._thread_id:
            call()
        else:
            self.call_soon(call)

    def stop(self) -> None:
        """Return from `run` soon. Runs on: any thread."""
        self._is_running = False
        self._wake_up()

    def run(self) -> None:
        """Call back until `stop` is called."""
        self._thread_id = threading.get_ident()
        while self._is_running:
            due_s = math.inf if self._deadline is None else self._deadline[0]
            for timer in self._timers:  # not in a generator, which would be a call for each timer
                due_s = min(due_s, timer.due_s)
            ready = self._selector.select(min(max(0.0, due_s - time.monotonic()), _LONGEST_WAIT_S))
            for key, _ in ready:
                if key.data is None:  # signals and pending calls come first
                    self._run_pending()
                    break
            for key, events in ready:
                if key.data is not None:
                    key.data(events)
            if (deadline := self._deadline) is not None and time.monotonic() >= deadline[0]:
                self._deadline = None
                deadline[1]()
            del deadline  # the call keeps its objects alive
            for timer in self._timers:
                if time.monotonic() >= timer.due_s:
                    timer.due_s = time.monotonic() + timer.interval_s
                    timer.call()

    def close(self) -> None:
        """Close the descriptors, after `run` has returned. Do not use `call_soon` afterwards."""
        self._opened.close()

    def _run_pending(self) -> None:
        # Signals first, and only calls that were made before: a signal may have led to a call.
        waiting = len(self._pending)
        with suppress(BlockingIOError):
            self._wakeup.recv(_CHUNK)
        ROUTER.deliver()
        for _ in range(waiting):
            self._pending.popleft()()
        if self._pending:
            self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError):  # full: the thread is about to look anyway; closed in a forked process
            self._wake.send(b"\0")


@contextmanager
def signals_delivered_in_thread() -> Iterator[None]:
    """Deliver signals in the block, also while C code blocks the main thread, by an event loop's thread."""
    if ROUTER.has_reader:
        yield
        return
    loop = EventLoop()
    thread = threading.Thread(target=loop.run, name="rankwise-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join()
        loop.close()

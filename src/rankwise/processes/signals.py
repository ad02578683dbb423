"""Signals: the router that delivers them to subscribers, SIGINT in workers, interrupting a rank."""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, final

from rankwise.processes import fork_safety

# A signal that comes again within this time repeats the same request: a scheduler signals all processes of a
# job, and torchrun's agent, which is one of them, forwards it; GNU `timeout` signals its command, then the
# command's process group.
DEBOUNCE_S = 2.0

_CHUNK = 1 << 12
_SIGACTION_SIZE = 512  # more than a `struct sigaction` has on any platform
_CAN_TELL_SENDER = "sigwaitinfo" in signal.__dict__  # not on macOS
_REPEAT_S = 0.05
# When the exception counts as lost: caught by an `except:`, or raised where Python ignores exceptions.
_LOST_S = 1.0

INTERRUPT_NOTICE = "rankwise: training stops at the end of this step. Ctrl-C again ends it at once.\n"
"""Printed at the first Ctrl-C while ranks train."""


class StoppedBySignal(BaseException):
    """Raised on every rank after training has stopped for a signal: checkpoint saved, at the same step.

    `stopped_by` returns one that is also a `SystemExit` or a `KeyboardInterrupt`.
    """

    def __init__(self, signal_number: int, *args: object) -> None:
        super().__init__(*args)
        self.signal_number = signal_number
        self.value: Any = None  # on a rank that a launcher has started: its return value
        self.values: dict[int, Any] = {}  # in the launching process: of this node's ranks, by global rank


@final
class _StoppedExit(StoppedBySignal, SystemExit):
    pass


@final
class _StoppedInterrupt(StoppedBySignal, KeyboardInterrupt):
    pass


def stopped_by(number: int) -> StoppedBySignal:
    """Return the exception for a job in which all ranks have stopped for a signal or finished."""
    if number == signal.SIGINT:
        return _StoppedInterrupt(number)
    return _StoppedExit(number, 128 + number)


def ended_by(number: int) -> SystemExit | KeyboardInterrupt:
    """Return the exception for work that a signal has ended, or a part of it."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def as_raised(error: BaseException) -> BaseException:
    """Return the exception that a launch raises for an error of its ranks: a plain one, caused by a stop."""
    if not isinstance(error, StoppedBySignal):
        return error
    raised = ended_by(error.signal_number)
    raised.__cause__ = error
    return raised


def reraise_from_handler(error: BaseException, *handled: BaseException | None) -> None:
    """Raise `error` if the handler of a signal has raised it.

    With `handled`, the exceptions that the caller was handling before, also raise such a cause of `error`:
    C code, and code that describes its errors, raise another error in its place.
    """
    last = handled or (error.__context__,)
    found: BaseException | None = error
    while found is not None and found not in last:
        is_request = not isinstance(found, (Exception, GeneratorExit))  # to end the program
        if is_request or any(_is_handler(frame) for frame, _ in traceback.walk_tb(found.__traceback__)):
            raise found
        found = found.__context__


def _is_handler(frame: FrameType) -> bool:
    """Whether a frame belongs to a signal handler: the function has the interrupted frame as an argument."""
    names, rest, _, values = inspect.getargvalues(frame)
    given = [*(values.get(name) for name in names), *(values.get(rest, ()) if rest else ())]
    return frame.f_back is not None and any(value is frame.f_back for value in given)


def raises_keyboard_interrupt() -> bool:
    """Whether SIGINT means Ctrl-C: the program has no handler of its own. Runs on: any thread."""
    return _before_all(signal.getsignal(signal.SIGINT)) is signal.default_int_handler


@final
class SignalRequest(NamedTuple):
    """One signal that this process has caught."""

    number: int
    is_repeat: bool = False  # it arrived within `DEBOUNCE_S` of a request, so it is the same request


@final
@dataclass(eq=False)
class _Subscription:
    numbers: frozenset[int]
    callback: Callable[[SignalRequest], None]
    in_main_thread: bool = False
    is_debounced: bool = True
    is_default_action: bool = False
    pending: deque[SignalRequest] = field(default_factory=deque)

    def take(self) -> Iterator[SignalRequest]:
        with suppress(IndexError):  # none is left
            while True:
                yield self.pending.popleft()


@final
class SignalRouter:
    """Deliver each signal once to every subscriber, even while the main thread is blocked in C code.

    Python writes the number of each signal to a wake-up descriptor. Two readers deliver what they read there:
    the main thread, in the Python handler of the signal, and each `EventLoop`, in its own thread. Whichever
    reads first delivers. Where another library replaces the wake-up descriptor, the handler alone delivers.

    Numbers are forwarded to the wake-up descriptor that was set before, and handlers call those that were set
    before. In a forked process nothing is subscribed.

    Mutates: handlers and wake-up descriptor of the process while something is subscribed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a handler may interrupt the main thread in `deliver`
        self._subscriptions: list[_Subscription] = []
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._users = 0  # subscriptions and event loops: the sockets are closed with the last
        self._loops = 0
        self._next_descriptor = -1
        self._request_s = -math.inf
        self._blocked: set[int] = set()  # in a DataLoader worker

    @contextmanager
    def subscribe(
        self,
        numbers: Iterable[int],
        callback: Callable[[SignalRequest], None],
        *,
        in_main_thread: bool = False,
        calls_earlier_handler: bool = True,
        is_debounced: bool = True,
        is_default_action: bool = False,
        sets_handler: bool = True,
    ) -> Iterator[None]:
        """Call `callback` with each of these signals in the block, then the handler that was set before.

        Outside the main thread, and for a signal that is ignored or handled in C, nothing happens.
        Signals count as one request when they come within `DEBOUNCE_S`.

        Args:
            numbers: of the signals.
            callback: called in the main thread or in the thread of an event loop.
            in_main_thread: call it in the main thread alone, where it may raise.
            calls_earlier_handler: False to call `callback` in place of the handler that was set before.
            is_debounced: False if each signal counts as a request of its own.
            is_default_action: call `callback` only where nobody else handles the signal.
            sets_handler: False to leave the handlers as they are: only an event loop delivers the signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = frozenset(numbers)
        subscription = _Subscription(signals, callback, in_main_thread, is_debounced, is_default_action)
        handled = signals if sets_handler else frozenset()
        before = {number: signal.getsignal(number) for number in handled}
        before = {number: old for number, old in before.items() if old is signal.SIG_DFL or callable(old)}
        with self._lock:
            sockets = self._acquire()
            self._subscriptions.append(subscription)
        try:
            if len(self._subscriptions) == 1:
                self._next_descriptor = _set_wakeup(sockets[1])
            for number, old in before.items():
                signal.signal(number, _Handler(self, old, calls_earlier_handler))
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)
            self._unsubscribe(subscription, sockets)

    def open_reader(self) -> socket.socket:
        """Return a socket that is readable when `deliver` has something to do; see `close_reader`."""
        with self._lock:
            reader = self._acquire()[0]
            self._loops += 1  # only now: no descriptor may be free
            return reader

    def close_reader(self, reader: socket.socket) -> None:
        """Stop reading from a socket that `open_reader` returned."""
        with self._lock:
            if self._sockets is not None and reader is self._sockets[0]:
                self._loops -= 1
                self._release(self._sockets)

    @property
    def has_reader(self) -> bool:
        """Whether an event loop delivers signals while the main thread is blocked."""
        return self._loops > 0

    def deliver(self) -> None:
        """Call the subscribers of the signals that were caught. Runs on: any thread, signal handlers too."""
        with self._lock:
            for number in self._receive():
                self._enqueue(number)
        is_main = threading.current_thread() is threading.main_thread()
        for subscription in list(self._subscriptions):
            if is_main or not subscription.in_main_thread:
                for request in subscription.take():
                    subscription.callback(request)

    def _unsubscribe(self, subscription: _Subscription, sockets: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            if sockets is not self._sockets:
                return  # a forked process leaves the block too
            self._subscriptions.remove(subscription)
            try:
                if not self._subscriptions:
                    self._request_s = -math.inf
                    self._restore_wakeup(sockets[1].fileno())
            finally:
                self._release(sockets)

    def _restore_wakeup(self, mine: int) -> None:
        current = signal.set_wakeup_fd(-1)
        with suppress(OSError, ValueError):  # closed meanwhile
            signal.set_wakeup_fd(self._next_descriptor if current == mine else current)
        self._next_descriptor = -1

    def _acquire(self) -> tuple[socket.socket, socket.socket]:
        if self._sockets is None:
            self._sockets = socket.socketpair()
            for each in self._sockets:
                each.setblocking(False)
            fork_safety.close_in_child(*self._sockets)
        self._users += 1
        return self._sockets

    def _release(self, sockets: tuple[socket.socket, socket.socket]) -> None:
        self._users -= 1
        if self._users == 0:
            self._sockets = None
            for each in sockets:
                each.close()

    def handle(self, number: int) -> None:
        """Deliver a signal from its Python handler. Runs on: the main thread."""
        with self._lock:
            if self._sockets is None or not self._subscriptions:
                return  # in a forked process, from a handler of the user's that calls this one
            mine = self._sockets[1].fileno()
            current = _set_wakeup(self._sockets[1])
            if current != mine:  # set or reset by another library
                self._enqueue(number)
                if current != -1:
                    signal.set_wakeup_fd(current)
        self.deliver()

    def _receive(self) -> bytes:
        if self._sockets is None:
            return b""
        try:
            numbers = self._sockets[0].recv(_CHUNK)
        except BlockingIOError:
            return b""
        if self._next_descriptor >= 0:
            with suppress(OSError):  # closed meanwhile, or full
                os.write(self._next_descriptor, numbers)
        return numbers

    def _enqueue(self, number: int) -> None:
        subscriptions = [each for each in self._subscriptions if number in each.numbers]
        takers = [each for each in subscriptions if not each.is_default_action]
        if not takers and isinstance(signal.getsignal(number), _Handler):
            takers = subscriptions
        is_request = any(each.is_debounced for each in takers)
        is_repeat = is_request and time.monotonic() - self._request_s < DEBOUNCE_S
        if is_request and not is_repeat:
            self._request_s = time.monotonic()
        for each in takers:
            each.pending.append(SignalRequest(number, is_repeat and each.is_debounced))

    def reset_in_child(self) -> None:
        """Restore the handlers that were set before all subscriptions: those are the parent's."""
        if self._blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._blocked)
        numbers = {number for each in self._subscriptions for number in each.numbers}
        self.__init__()  # the lock may be held by a thread that does not exist here
        if not numbers:
            return
        signal.set_wakeup_fd(-1)  # it wakes the parent
        replaced = {number for number in numbers if isinstance(signal.getsignal(number), _Handler)}
        for number in replaced:
            signal.signal(number, _before_all(signal.getsignal(number)))
        if _is_forked_by_data_loader():
            self._block_until_rank_exits(replaced)

    def _block_until_rank_exits(self, numbers: set[int]) -> None:
        """Ignore signals to the process group in a DataLoader worker, but obey SIGTERM from its rank."""
        # The rank needs its data until it reaches a boundary: torch raises in it when a worker has gone.
        if not _CAN_TELL_SENDER:
            numbers = numbers - {signal.SIGTERM}
        self._blocked = numbers
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        if signal.SIGTERM in numbers:
            threading.Thread(target=_exit_on_parents_sigterm, name="rankwise-sigterm", daemon=True).start()


@final
@dataclass(eq=False)
class _Handler:
    """The Python handler of a subscribed signal: deliver, then call the handler that was set before."""

    router: SignalRouter
    before: Any
    calls_before: bool

    def __call__(self, number: int, interrupted: FrameType | None) -> None:
        self.router.handle(number)
        before = _before_all(self)
        if self.calls_before and callable(before):
            before(number, interrupted)


def _before_all(handler: Any) -> Any:
    while isinstance(handler, _Handler):
        handler = handler.before
    return handler


def _set_wakeup(sock: socket.socket) -> int:
    return signal.set_wakeup_fd(sock.fileno(), warn_on_full_buffer=False)


def _is_forked_by_data_loader() -> bool:
    loading = sys.modules.get("torch.utils.data.dataloader")
    frames = frames_from(sys._getframe())
    return loading is not None and any(each.f_globals is vars(loading) for each in frames)


def _exit_on_parents_sigterm() -> None:
    # torch, and multiprocessing when the rank exits, end a worker that hangs by SIGTERM.
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass  # from the scheduler or torchrun: the rank has received it too
    os._exit(0)  # as torch's own handler does: it is not a failure


ROUTER = SignalRouter()
"""The router of this process."""

os.register_at_fork(after_in_child=ROUTER.reset_in_child)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in processes that are started in this block, until they have a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts_in_workers() -> None:
    """Leave SIGINT to the main process, in this worker; signals of a fork do not wake that process."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which programs that it executes inherit
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def exit_statuses_kept() -> Iterator[None]:
    """Keep, in the block, the exit status of each child of this process for the code that waits for it.

    The kernel drops it while SIGCHLD is ignored, and a handler may wait for all of them. Runs on: any thread.

    Mutates: the action of SIGCHLD, which is restored on exit; a handler of Python's runs then.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL:
        yield
        return
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_SIZE)
    default = ctypes.create_string_buffer(_SIGACTION_SIZE)  # all zero: SIG_DFL, no flags, no signals blocked
    libc.sigaction(signal.SIGCHLD, default, before)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGCHLD, before, None)
        signal.raise_signal(signal.SIGCHLD)


def exit_by_signal(number: int) -> None:
    """End this process by a signal, whatever handles it. Runs on: any thread, unlike `signal.signal`."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)


@final
class JobStopped(BaseException):
    """Raised in the main thread of a rank after STOP from the supervisor; `finally` blocks run."""


@final
class Interruptible:
    """A block of the main thread, and of no other, that another thread can end, by `interrupt`.

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

    def __enter__(self) -> Interruptible:
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
        while not self._left.wait(_REPEAT_S if self._raised_s == -math.inf else _LOST_S):
            with self._lock:
                if not self._left.is_set():
                    signal.pthread_kill(self._thread_id, self._signal)

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
        # Python ignores an exception in a __del__.
        return is_cleaning_up or any(each.f_code.co_name == "__del__" for each in frames_from(interrupted))


def _free_signal() -> int | None:
    if "SIGRTMIN" in signal.__dict__:
        candidates = range(int(signal.SIGRTMIN), int(signal.SIGRTMAX) + 1)
    else:  # macOS has no real-time signals
        candidates = range(int(signal.SIGUSR1), int(signal.SIGUSR2) + 1)
    return next((number for number in candidates if signal.getsignal(number) is signal.SIG_DFL), None)


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, if there is one, and all that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back

"""Signal handlers: set, chained, and put back; repeated signals; threads that receive one signal."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from typing_extensions import Self

from rankwise.processes import fork_safety

Handler = Callable[[int, FrameType | None], Any]

# What is sent again within this time of the first has one cause with it.
DEBOUNCE_S = 2.0

# The handlers that are ours at the moment, and those of before.
_before: dict[int, Any] = {}
# What this process, a loader's worker, keeps from its threads.
_held_back: set[int] = set()
_CAN_TELL_SENDER = "sigwaitinfo" in signal.__dict__  # not on macOS


@final
class StoppedBySignal(SystemExit):
    """Raised on every rank once training has stopped for a signal: saved, and at the same step."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


@final
class SignalDebouncer:
    """Tell a signal that insists from one that merely comes twice.

    A scheduler signals all processes of a job, and torchrun's agent, which is one of them, passes it on; GNU
    `timeout` signals its command, then the command's group.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_propagated(self) -> bool:
        """Take note of a signal; return whether it only repeats the first. Runs on: signal handlers, too."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            return False
        return now_s - self._first_s < DEBOUNCE_S


# ---------------------------------------------------------------------------------------- Ctrl-C


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start processes within this block: they begin with SIGINT blocked, before they have a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts_in_workers() -> None:
    """Do nothing on SIGINT from here on, in this worker.

    A handler, not SIG_IGN: what the worker executes in its turn must not inherit the deafness.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _nothing(signum: int, interrupted: FrameType | None) -> None:
    pass


# ---------------------------------------------------------------------------------------- for a while


@contextmanager
def handling(numbers: Iterable[int], handler: Handler | None = None) -> Iterator[None]:
    """Call `handler` on these signals in the block, then whatever handled them before.

    Outside the main thread, and for a signal that is ignored or handled in C, nothing changes. Processes that
    are forked in the block begin with the handlers of before it.

    Mutates: the handlers of the signals, restored on exit.
    """
    mine = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            before = signal.getsignal(number)
            if before is signal.SIG_DFL or callable(before):
                mine[number] = before
    _undo_in_children(mine)
    for number, before in mine.items():
        signal.signal(number, _chained(handler, before))
    try:
        yield
    finally:
        for number, before in mine.items():
            signal.signal(number, before)
        _forget(mine)


def _chained(first: Handler | None, then: Any) -> Handler:
    def handle(signum: int, interrupted: FrameType | None) -> None:
        if first is not None:
            first(signum, interrupted)
        if callable(then):
            then(signum, interrupted)

    return handle


def _undo_in_children(mine: dict[int, Any]) -> None:
    for number, before in mine.items():
        _before.setdefault(number, before)
    _hook_forks()


@functools.cache  # a hook stays, in children too
def _hook_forks() -> None:
    os.register_at_fork(after_in_child=_restore_in_child)


def _forget(mine: dict[int, Any]) -> None:
    for number, before in mine.items():
        if _before.get(number) is before:
            del _before[number]


def _restore_in_child() -> None:
    if _held_back:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _held_back)
        _held_back.clear()
    if not _before:
        return
    signal.set_wakeup_fd(-1)  # it wakes the parent
    for number, before in _before.items():
        signal.signal(number, before)
    if _is_forked_by_a_loader():
        _block_until_handled(set(_before))
    _before.clear()


def _is_forked_by_a_loader() -> bool:
    loading = sys.modules.get("torch.utils.data.dataloader")
    frame: FrameType | None = sys._getframe()
    while loading is not None and frame is not None:
        if frame.f_globals is vars(loading):
            return True
        frame = frame.f_back
    return False


def _block_until_handled(numbers: set[int]) -> None:
    """Do not end for a signal to the whole group, unlike for one from the rank whose data this worker loads.

    The rank has to come to its boundary first, and torch would raise in it when its data end.
    """
    if not _CAN_TELL_SENDER:
        numbers = numbers - {signal.SIGTERM}
    _held_back.update(numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    if signal.SIGTERM in numbers:
        threading.Thread(target=_exit_on_request, name="rankwise-sigterm", daemon=True).start()


def _exit_on_request() -> None:
    # With SIGTERM torch, and multiprocessing when the rank exits, end a worker that is stuck.
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass  # the scheduler's, or torchrun's: the rank has it, too
    os._exit(0)  # as torch's own handler does: it is no failure


_CHUNK = 1 << 12
_LEAVE = b"\0"


@final
class SignalThread:
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
        fork_safety.close_in_child(self._read, self._write)
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
        fork_safety.forget(self._read, self._write)
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


def exit_by_signal(number: int) -> None:
    """End this process by a signal, whatever handles it. Runs on: any thread, unlike `signal.signal`."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)

"""Signal handlers: whose they are, for how long, and what a forked process makes of them."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from typing_extensions import final

Handler = Callable[[int, FrameType | None], Any]

# What is sent again within this time of the first has one cause with it.
ECHO_S = 2.0

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
class Echoes:
    """Tell a signal that insists from one that merely comes twice.

    A scheduler signals all processes of a job, and torchrun's agent, which is one of them, passes it on; GNU
    `timeout` signals its command, then the command's group.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_echo(self) -> bool:
        """Take note of a signal; return whether it only repeats the first. Runs on: signal handlers, too."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            return False
        return now_s - self._first_s < ECHO_S


# ---------------------------------------------------------------------------------------- Ctrl-C


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start processes within this block: they begin with SIGINT blocked, before they have a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts_to_the_main_process() -> None:
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
def handled(numbers: Iterable[int], handler: Handler | None = None) -> Iterator[None]:
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
        _hold_back(set(_before))
    _before.clear()


def _is_forked_by_a_loader() -> bool:
    loading = sys.modules.get("torch.utils.data.dataloader")
    frame: FrameType | None = sys._getframe()
    while loading is not None and frame is not None:
        if frame.f_globals is vars(loading):
            return True
        frame = frame.f_back
    return False


def _hold_back(numbers: set[int]) -> None:
    """Do not end for a signal to the whole group, unlike for one from the rank whose data this worker loads.

    The rank has to come to its boundary first, and torch would raise in it when its data end.
    """
    if not _CAN_TELL_SENDER:
        numbers = numbers - {signal.SIGTERM}
    _held_back.update(numbers)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    if signal.SIGTERM in numbers:
        threading.Thread(target=_leave_when_told, name="rankwise-sigterm", daemon=True).start()


def _leave_when_told() -> None:
    # With SIGTERM torch, and multiprocessing when the rank exits, end a worker that is stuck.
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass  # the scheduler's, or torchrun's: the rank has it, too
    os._exit(0)  # as torch's own handler does: it is no failure

"""SIGTERM for a rank whose thread writes a checkpoint: it ends once that is there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from rankwise.checkpoint import CheckpointIO
from rankwise.monitoring.heartbeat import report_saving
from rankwise.processes.event_loop import signals_delivered_in_thread
from rankwise.processes.signals import ROUTER, SignalRequest, exit_by_signal


@contextmanager
def sigterm_deferred(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Let a thread of `checkpoint_io` finish its checkpoint before SIGTERM ends this process, in the block.

    torch's agents send SIGTERM to all ranks as soon as one has failed. A second one, 2 s later or more, ends
    the process at once; so does the first where nothing is being written. This holds while the main thread is
    blocked in C++ too, as in a collective. Where something else handles SIGTERM, as the loop of a fit does,
    nothing changes.

    Mutates: the handler of SIGTERM and the signal wake-up descriptor, restored on exit.
    """
    deferred = _DeferredSigterm()
    checkpoint_io.on_saving_changed(deferred.on_saving_changed)
    writes_in_a_thread = type(checkpoint_io).on_saving_changed is not CheckpointIO.on_saving_changed
    if not writes_in_a_thread or not _ends_by_default():
        yield
        return
    default_action = ROUTER.replace_default_action(signal.SIGTERM, deferred.on_sigterm)
    with signals_delivered_in_thread(), default_action:
        yield


def _ends_by_default() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@final
class _DeferredSigterm:
    def __init__(self) -> None:
        self._is_saving = False
        self._is_due = False

    def on_saving_changed(self, is_saving: bool) -> None:
        report_saving(is_saving)
        self._is_saving = is_saving
        if self._is_due and not is_saving:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_sigterm(self, request: SignalRequest) -> None:
        is_second = self._is_due and not request.is_repeat
        # Set the flag, then read the other; `on_saving_changed` does the reverse. So one of them sees both.
        self._is_due = True
        if is_second or not self._is_saving:
            exit_by_signal(signal.SIGTERM)

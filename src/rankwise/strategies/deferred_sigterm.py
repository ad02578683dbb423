"""SIGTERM for a rank whose thread writes a checkpoint: it ends once that is there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from rankwise.checkpoint import CheckpointIO
from rankwise.monitoring.heartbeat import report_saving
from rankwise.processes.signals import SignalDebouncer, SignalThread, exit_by_signal, handling


@contextmanager
def sigterm_deferred(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Let a thread of `checkpoint_io` write what it has begun before SIGTERM ends this process, in the block.

    torch's agents send it to all ranks as soon as one has failed; 2 s later it insists, and is obeyed. All of
    it holds while the main thread is in C++, too, as in a collective that waits for others. Where something
    else handles it, as the loop of a fit does, nothing changes; where nothing is being written, it ends the
    process at once, as ever.

    Mutates: the handler of SIGTERM and the signal wake-up descriptor, restored on exit.
    """
    deferred = _DeferredSigterm()
    checkpoint_io.on_saving_changed(deferred.tell)
    writes_in_a_thread = type(checkpoint_io).on_saving_changed is not CheckpointIO.on_saving_changed
    if not writes_in_a_thread or not _ends_by_default():
        yield
        return
    with deferred.listening, handling([signal.SIGTERM], deferred.catch):
        deferred.handler = signal.getsignal(signal.SIGTERM)
        yield


def _ends_by_default() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@final
class _DeferredSigterm:
    def __init__(self) -> None:
        self.listening = SignalThread(signal.SIGTERM, self.hear)
        self.handler: Any = None
        self._is_saving = False
        self._is_due = False
        self._debouncer = SignalDebouncer()

    def tell(self, is_saving: bool) -> None:
        report_saving(is_saving)
        self._is_saving = is_saving
        if self._is_due and not is_saving:
            os.kill(os.getpid(), signal.SIGTERM)

    def catch(self, signum: int, interrupted: FrameType | None) -> None:
        # Not twice: this may run long after the thread has heard, and the same signal would then insist.
        if not self.listening.hears():
            self.hear()

    def hear(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if self.handler is not None and handler not in (self.handler, signal.SIG_DFL):
            return  # whoever has taken over calls this one, too
        is_propagated = self._debouncer.is_propagated()
        insists = self._is_due and not is_propagated
        # First the flag, then the look; `tell` does it the other way round. So one of them sees the other.
        self._is_due = True
        if insists or not self._is_saving:
            exit_by_signal(signal.SIGTERM)

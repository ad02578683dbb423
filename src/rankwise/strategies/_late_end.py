"""SIGTERM for a rank whose thread writes a checkpoint: it ends once that is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from typing_extensions import final

from rankwise.checkpoint import CheckpointIO
from rankwise.launchers._signals import Echoes, handled
from rankwise.process_group.pulse import say_saving


@contextmanager
def ending_once_saved(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Let a thread of `checkpoint_io` write what it has begun before SIGTERM ends this process, in the block.

    torch's agents send it to all ranks as soon as one has failed; 2 s later it insists, and is obeyed. Where
    something else handles it, as the loop of a fit does, or nothing is being written, nothing changes.

    Mutates: the handler of SIGTERM, restored on exit.
    """
    late_end = _LateEnd()
    checkpoint_io.tell_when_saving(late_end.tell)
    writes_in_a_thread = type(checkpoint_io).tell_when_saving is not CheckpointIO.tell_when_saving
    if not writes_in_a_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    with handled([signal.SIGTERM], late_end.end):
        late_end.handler = signal.getsignal(signal.SIGTERM)
        yield


@final
class _LateEnd:
    def __init__(self) -> None:
        self.handler: Any = None
        self._is_saving = False
        self._is_due = False
        self._echoes = Echoes()

    def tell(self, is_saving: bool) -> None:
        say_saving(is_saving)
        self._is_saving = is_saving
        if self._is_due and not is_saving:
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self, signum: int, interrupted: FrameType | None) -> None:
        if signal.getsignal(signum) is not self.handler:
            return  # whoever has taken over calls this one, too
        is_echo = self._echoes.is_echo()
        insists = self._is_due and not is_echo
        # First the flag, then the look; `tell` does it the other way round. So one of them sees the other.
        self._is_due = True
        if insists or not self._is_saving:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

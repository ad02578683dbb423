"""A rank's heartbeat: its step and phase, in a page of shared memory.

Writing costs a fraction of a microsecond, and what a rank wrote last can be read however it hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

__all__ = [
    "LEAVING",
    "FailureTime",
    "NO_FILE",
    "Heartbeat",
    "HeartbeatReader",
    "TEARDOWN",
    "report_phase",
    "failure_time_of",
    "own_heartbeat",
    "heartbeat_written_to",
    "report_saving",
    "blocked_in",
    "write_heartbeat_to",
]

# The step (-1 for none), the time on the node's monotonic clock, whether it waits for others, the phase.
_RECORD = struct.Struct("=qd?47s")
_LENGTH = 47
# The phases of a training step.
_ORDER = ("data loading", "forward", "backward", "optimizer")
# Behind the record, as another thread writes it: whether checkpoints are being written.
_SAVING = struct.Struct("=?")

NO_FILE = -1
"""In place of a descriptor: the page is this process's alone, for `own_heartbeat`."""

TEARDOWN = "teardown"
"""The phase of a rank whose work is done, and that still has to leave."""

LEAVING = "leaving"
"""The phase of a process that was started for one job and is done: its threads and exit hooks end."""

_page: mmap.mmap | None = None
_current: tuple[int, bool, str] = (-1, False, "")


def write_heartbeat_to(descriptor: int | None) -> None:
    """Write this process's heartbeat into a file from here on; None stops it."""
    global _page
    _page = None if descriptor is None else mmap.mmap(descriptor, mmap.PAGESIZE)
    report_phase("starting", step=-1)


@contextmanager
def heartbeat_written_to(descriptor: int) -> Iterator[None]:
    """Write this process's heartbeat into a file in the block."""
    write_heartbeat_to(descriptor)
    try:
        yield
    finally:
        write_heartbeat_to(None)


def report_phase(phase: str, *, step: int | None = None, waits: bool = False) -> None:
    """Say what this rank does from here on; nothing where nobody reads it.

    Args:
        phase: in a few words.
        step: the optimizer step; the one said last if it is left out.
        waits: whether other ranks may hold this one up.
    """
    global _current
    if _page is None:
        return
    number = _current[0] if step is None else step
    _current = (number, waits, phase)
    _RECORD.pack_into(_page, 0, number, time.monotonic(), waits, phase.encode("utf-8", "replace")[:_LENGTH])


def report_saving(is_saving: bool) -> None:
    """Say whether a thread of this rank writes checkpoints, which this rank's end should not cut.

    Runs on: any thread.
    """
    if _page is not None:
        _SAVING.pack_into(_page, _RECORD.size, is_saving)


@contextmanager
def blocked_in(phase: str) -> Iterator[None]:
    """Say that this rank waits for others in the block; after it, does what it did before.

    Where the block fails as torch does when others do not come, this rank goes on being seen there.
    """
    if _page is None:
        yield
        return
    step, waits, before = _current
    report_phase(phase, waits=True)
    try:
        yield
    except RuntimeError:
        raise
    except BaseException:
        report_phase(before, step=step, waits=waits)
        raise
    report_phase(before, step=step, waits=waits)


def own_heartbeat() -> Heartbeat | None:
    """Return what this process has written last; None where it writes nothing. Runs on: any thread."""
    return None if _page is None else _read(_page)


@final
@dataclass(frozen=True)
class Heartbeat:
    """What a rank wrote last.

    Attributes:
        step: the optimizer step; -1 where there is none.
        at_s: when, on the node's monotonic clock; 0 for never.
        waits: whether other ranks may hold it up.
        phase: what it does.
    """

    step: int
    at_s: float
    waits: bool
    phase: str

    def seconds_ago(self, now_s: float | None = None) -> float:
        """Return how long the rank has been at it, or had been at a time of the node's monotonic clock."""
        return (time.monotonic() if now_s is None else now_s) - self.at_s

    def waited_at(self, at_s: float) -> bool:
        """Return whether the rank was waiting already at a time of the node's monotonic clock."""
        return self.waits and self.at_s <= at_s

    def waits_for(self, other: Heartbeat) -> bool:
        """Whether the rank waits, or has come to where a wrapper makes it wait, beyond where another is."""
        if self.waits:
            return self.step >= other.step
        is_in_step = self.phase in _ORDER and other.phase in _ORDER
        return is_in_step and (self.step, _ORDER.index(self.phase)) > (other.step, _ORDER.index(other.phase))

    def where(self) -> str:
        """Return step and phase for a reader."""
        if not self.at_s:
            return "not started"
        return f"{self.phase}" if self.step < 0 else f"step {self.step}, {self.phase}"


@final
class HeartbeatReader:
    """The launching process's view of a rank's page.

    Args:
        descriptor: an anonymous file, which is given its size.
    """

    def __init__(self, descriptor: int) -> None:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    def read(self) -> Heartbeat:
        """Return what the rank wrote last."""
        return _read(self._page)

    def is_saving(self) -> bool:
        """Return whether a thread of the rank writes checkpoints."""
        return bool(_SAVING.unpack_from(self._page, _RECORD.size)[0])


def _read(page: mmap.mmap) -> Heartbeat:
    step, at_s, waits, phase = _RECORD.unpack_from(page)
    return Heartbeat(step, at_s, waits, phase.rstrip(b"\0").decode("utf-8", "replace"))


_TIME_MARK = "_rankwise_moment"


@final
@dataclass(frozen=True)
class FailureTime:
    """When it was, on the node's monotonic clock, and the heartbeat of then; None where nobody reads it."""

    at_s: float
    heartbeat: Heartbeat | None


def failure_time_of(error: BaseException) -> FailureTime:
    """Return the moment at which an exception ended this rank's work: when this was first called with it."""
    moment: FailureTime | None = vars(error).get(_TIME_MARK)
    if moment is None:
        moment = vars(error)[_TIME_MARK] = FailureTime(time.monotonic(), own_heartbeat())
    return moment

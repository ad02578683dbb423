"""A rank's heartbeat: its step and phase, in a page of shared memory.

Writing takes a fraction of a microsecond. The launching process can read it while the rank hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, final

from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo

# The step (-1 for none), the time on the node's monotonic clock, whether it waits for others, the phase.
_RECORD = struct.Struct("=qd?47s")
OPTIMIZER = "optimizer"  # the phase of an optimizer step
_ORDER = ("data loading", "forward", "backward", OPTIMIZER)  # the phases of a training step
# After the record, as another thread writes the first one: whether a thread writes checkpoints, and whether
# this one does in a hook after a failure.
_SAVING_AT, _SAVING_IN_HOOK_AT = _RECORD.size, _RECORD.size + 1
_CONTENTS = _RECORD.size + 2  # bytes
NO_FILE = -1  # in place of a descriptor: no other process reads the page, only `own_heartbeat`
TEARDOWN = "teardown"  # the phase of a rank that has done its work and cleans up
LEAVING = "leaving"  # of a process that was started for one job and exits: its threads and exit hooks end

# Called with the step and the phase that this rank begins; for tests, which let it fail there.
on_phase: Callable[[int, str], None] | None = None
_page: mmap.mmap | None = None
_current: tuple[int, bool, str] = (-1, False, "")


def _forget_page() -> None:
    global _page
    _page = None  # a process that a rank forks is not the rank


os.register_at_fork(after_in_child=_forget_page)


def write_heartbeat_to(descriptor: int | None) -> None:
    """Write this process's heartbeat into a file from here on; None stops that."""
    global _page
    _page = None if descriptor is None else mmap.mmap(descriptor, mmap.PAGESIZE)
    report_phase("starting", step=-1)


@contextmanager
def heartbeat_written_to(descriptor: int | None) -> Iterator[None]:
    """Write this process's heartbeat into a file in the block, or nowhere; then as before."""
    global _page, _current
    before = _page, _current
    write_heartbeat_to(descriptor)
    try:
        yield
    finally:
        _page, _current = before


def report_phase(phase: str, *, step: int | None = None, waits: bool = False) -> None:
    """Write this rank's phase and step (None: as before), if it has a heartbeat.

    `waits`: whether the phase ends only when other ranks come.
    """
    global _current
    if _page is None:
        return
    number = _current[0] if step is None else step
    _current = (number, waits, phase)
    _RECORD.pack_into(_page, 0, number, time.monotonic(), waits, phase.encode("utf-8", "replace"))
    if on_phase is not None:
        on_phase(number, phase)


def report_saving(is_saving: bool) -> None:
    """Report whether a thread of this rank writes checkpoints; the supervisor waits for it."""
    if _page is not None:
        _page[_SAVING_AT] = is_saving


@contextmanager
def saving_in_hook_reported() -> Iterator[None]:
    """Report that this rank saves a checkpoint in the block; the supervisor waits for it."""
    page = _page
    if page is None:
        yield
        return
    before, page[_SAVING_IN_HOOK_AT] = page[_SAVING_IN_HOOK_AT], True
    try:
        yield
    finally:
        page[_SAVING_IN_HOOK_AT] = before


@contextmanager
def blocked_in(phase: str) -> Iterator[None]:
    """Report a phase that waits for other ranks in the block, then the phase of before."""
    step, waits, before = _current
    report_phase(phase, waits=True)
    has_lost_others = False
    try:
        yield
    except RuntimeError:  # which torch raises when others do not come; the phase stays
        has_lost_others = True
        raise
    finally:
        if not has_lost_others:
            report_phase(before, step=step, waits=waits)


def own_heartbeat() -> Heartbeat | None:
    """Return this process's own heartbeat; None where it has none. Runs on: any thread."""
    return None if _page is None else _read(_page)


def contents_of_page(clock_offset_s: float) -> bytes:
    """Return this process's heartbeat for `HeartbeatReader.receive`, with times of the reader's clock."""
    if _page is None:
        return bytes(_CONTENTS)
    step, at_s, waits, phase = _RECORD.unpack_from(_page)
    return _RECORD.pack(step, at_s + clock_offset_s, waits, phase) + _page[_RECORD.size : _CONTENTS]


@final
@dataclass(frozen=True)
class Heartbeat:
    """The last values that a rank wrote: see `report_phase`."""

    step: int  # of the optimizer; -1 if there is none
    at_s: float  # when, on the node's monotonic clock; 0 for never
    waits: bool
    phase: str

    def seconds_ago(self, now_s: float | None = None) -> float:
        """Return for how long the rank is in this phase, by default now."""
        return (time.monotonic() if now_s is None else now_s) - self.at_s

    def waited_at(self, at_s: float) -> bool:
        """Return whether the rank waited at a time of the node's monotonic clock."""
        return self.waits and self.at_s <= at_s

    def waits_for(self, other: Heartbeat) -> bool:
        """Return whether the rank waits for another one, or is further on in the same training loop."""
        if self.waits:
            return self.step >= other.step
        is_in_step = self.phase in _ORDER and other.phase in _ORDER
        return is_in_step and (self.step, _ORDER.index(self.phase)) > (other.step, _ORDER.index(other.phase))

    def where(self) -> str:
        """Return step and phase for a reader."""
        if not self.at_s:
            return "not started"
        return self.phase if self.step < 0 else f"step {self.step}, {self.phase}"

    def status_of(self, name: str, now_s: float | None = None) -> str:
        """Return a line with a rank's name, its phase, and for how long it is in it."""
        return f"{name} was last in {self.where()}, {max(0.0, self.seconds_ago(now_s)):.0f} s ago"


@final
class HeartbeatReader:
    """Read a rank's page, in the launching process: an anonymous file, which is given its size."""

    def __init__(self, descriptor: int) -> None:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    def read(self) -> Heartbeat:
        """Return what the rank wrote last."""
        return _read(self._page)

    def receive(self, contents: bytes) -> None:
        """Take what `contents_of_page` returned in the rank's process; nothing where it writes the page."""
        if contents:
            self._page[:_CONTENTS] = contents  # raises for another length

    def close(self) -> None:
        """Close the page; nobody reads it afterwards."""
        self._page.close()

    def is_saving(self) -> bool:
        """Return whether a thread of the rank writes checkpoints, or a hook after a failure."""
        return bool(self._page[_SAVING_AT] or self._page[_SAVING_IN_HOOK_AT])


def _read(page: mmap.mmap) -> Heartbeat:
    step, at_s, waits, phase = _RECORD.unpack_from(page)
    return Heartbeat(step, at_s, waits, phase.rstrip(b"\0").decode("utf-8", "replace"))


@dataclass(eq=False)
class MonitoredRank:
    """A local rank: its process, its heartbeat, and whether it still runs."""

    ranks: RankInfo
    process: StartedProcess | None  # None for the rank that runs in the supervising process
    heartbeat: HeartbeatReader
    has_started: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)

    @property
    def pid(self) -> int:
        """The process id; 0 for the rank that runs in the supervising process."""
        return 0 if self.process is None else self.process.pid

    def status(self, heartbeat: Heartbeat | None = None, now_s: float | None = None) -> str:
        """Return in one line the phase that the rank is in and for how long; by default now."""
        heartbeat = self.heartbeat.read() if heartbeat is None else heartbeat
        name = f"global_rank={self.ranks.global_rank}"
        if not self.has_started and not heartbeat.at_s:
            return f"{name} has not started yet"
        return heartbeat.status_of(name, now_s)


class FailureTime(NamedTuple):
    """When a rank failed, on the node's monotonic clock, and its heartbeat then; None where it has none."""

    at_s: float
    heartbeat: Heartbeat | None


def failure_time_of(error: BaseException) -> FailureTime:
    """Return when this function was first called with an exception."""
    now = FailureTime(time.monotonic(), own_heartbeat())
    failed: FailureTime = vars(error).setdefault("_rankwise_failure_time", now)
    return failed

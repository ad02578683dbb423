"""Describe how a rank has failed, and build the exception of a job from the records of its ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, final

from rankwise.errors import (
    NO_TEXT,
    WorkerError,
    WorkerExitedError,
    WorkerKilledError,
    WorkerRaisedError,
    WorkerTimedOutError,
    exit_code_text,
    signal_name,
    text_of,
)
from rankwise.failures.classify import chain_of, is_consequence, is_timeout, readable
from rankwise.monitoring.heartbeat import Heartbeat, MonitoredRank, failure_time_of
from rankwise.paths import path_in_package
from rankwise.ranks import RankInfo
from rankwise.stores.values import decoded

_LINE_LENGTH = 160
_AT_ONCE_S = 0.2  # how soon a rank in a collective that has no phase of its own fails after another rank


@final
@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure: an exception, or how its process ended."""

    global_rank: int
    local_rank: int
    node_rank: int
    pid: int
    at_s: float  # by CLOCK_MONOTONIC, which is one clock for all processes of a node
    exception_type: str = ""  # empty where only `exit_status` is known
    exception_message: str = ""
    traceback_text: str = ""
    exit_status: int | None = None  # negative: a signal; None: unknown, or an exception ended the rank
    phase: str = "before it had finished"  # where in the job the process ended
    missing: tuple[int, ...] = ()  # after a timeout, the global ranks that did not come
    last_seen: tuple[str, ...] = ()  # after a timeout, where each other rank was
    notes: tuple[str, ...] = ()  # what else to look at
    is_consequence: bool = False  # of another rank's failure, or of the supervisor's stop
    is_timeout: bool = False  # whether other ranks did not come in time, to a collective or in the store
    heartbeat: Heartbeat | None = None  # this rank's own when it failed
    has_met: bool = True  # whether it had met other nodes' ranks, and so could publish its failure itself
    host: str = field(default_factory=socket.gethostname)  # a record is made on the node of its rank

    @classmethod
    def of_rank(cls, ranks: RankInfo, pid: int, **facts: Any) -> FailureRecord:
        """Describe how a rank failed; now, unless the facts have `at_s`."""
        facts = {"at_s": time.monotonic(), **facts}
        return cls(ranks.global_rank, ranks.local_rank, ranks.node_rank, pid, **facts)

    @classmethod
    def of_timeout(cls, ranks: RankInfo, pid: int, error: Exception) -> FailureRecord:
        """Describe a limit that the supervisor has seen pass; `ranks` are of a rank that it concerns."""
        name, text = type(error).__name__, str(error)
        return cls.of_rank(ranks, pid, is_timeout=True, exception_type=name, exception_message=text)

    @classmethod
    def of_exception(cls, ranks: RankInfo, error: BaseException) -> FailureRecord:
        """Describe an exception that ended this rank's work. Runs on: that rank."""
        return cls.of_rank(ranks, os.getpid(), **_facts_of(error))

    def of_value(self, error: BaseException) -> FailureRecord:
        """Describe why this rank's return value could not be read. Runs on: the launching process."""
        facts = _facts_of(error)
        message = f"what it returned cannot be unpickled: {facts['exception_message']}"
        return dataclasses.replace(self, **{**facts, "exception_message": message})

    @classmethod
    def from_json(cls, payload: bytes) -> FailureRecord:
        """Return the record that `to_json` wrote; raise `ProcessGroupError` if `payload` has none."""
        return decoded(cls, payload, "a failure record")

    def on_clock_of(self, offset_s: float, **facts: Any) -> FailureRecord:
        """Return the record with times of a clock that is this much ahead, and with other facts replaced."""
        own = self.heartbeat
        heartbeat = None if own is None else dataclasses.replace(own, at_s=own.at_s + offset_s)
        return dataclasses.replace(self, at_s=self.at_s + offset_s, heartbeat=heartbeat, **facts)

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    def _is_like(self, other: FailureRecord) -> bool:
        return bool(self.traceback_text) and self.traceback_text == other.traceback_text

    def line(self) -> str:
        """Return the record in one line."""
        if self.exception_type:
            what = f"{self.exception_type}: {self.exception_message}".partition("\n")[0]
            how = f"raised {what if len(what) <= _LINE_LENGTH else f'{what[: _LINE_LENGTH - 3]}...'}"
        elif self.exit_status is not None and self.exit_status < 0:
            how = f"was killed by {signal_name(-self.exit_status)}"
        else:
            how = f"exited with {exit_code_text(self.exit_status)}"
        return f"global_rank {self.global_rank} {how}"

    def to_error(
        self,
        started_s: float,
        stopped: Sequence[int],
        others: Sequence[FailureRecord],
        stopped_at: Mapping[int, str] = MappingProxyType({}),
    ) -> WorkerError:
        """Build the exception for the caller; `stopped_at` has the tracebacks of ranks that were stopped."""
        failed_at = {other.global_rank: other.traceback_text for other in others if other.traceback_text}
        own = ("global_rank", "local_rank", "node_rank", "pid", "host", "traceback_text")
        facts: dict[str, Any] = {
            **{name: getattr(self, name) for name in own},
            "elapsed_s": max(0.0, self.at_s - started_s),
            "stopped": tuple(stopped),
            "consequences": tuple(other.line() for other in others if not self._is_like(other)),
            "alike": tuple(sorted(other.global_rank for other in others if self._is_like(other))),
            "other_tracebacks": {**stopped_at, **failed_at},
        }
        if self.exit_status is None and self.exception_type:
            facts |= {"exception_type": self.exception_type, "exception_message": self.exception_message}
            if self.is_timeout:
                facts["missing"] = tuple(sorted({*self.missing} - {self.global_rank}))
                facts["last_seen"] = (*self.last_seen, *self.notes)
                return WorkerTimedOutError(**facts)
            return WorkerRaisedError(**facts, has_lost_peer=self.is_consequence)
        if self.exit_status is not None and self.exit_status < 0:
            return WorkerKilledError(**facts, signal_number=-self.exit_status)
        return WorkerExitedError(**facts, exit_code=self.exit_status, phase=self.phase)


def first_cause(records: Sequence[FailureRecord]) -> FailureRecord:
    """Return the earliest failure that is not a consequence, or else the earliest of all."""
    return min(records, key=lambda record: (record.is_consequence, record.at_s))


def _facts_of(error: BaseException) -> dict[str, Any]:
    error = readable(error)
    failed, message = failure_time_of(error), text_of(error)
    return {
        "at_s": failed.at_s,
        "exception_type": type(error).__name__,
        "exception_message": message,
        "traceback_text": _traceback_of(error, message),
        "exit_status": _exit_code(error),
        "is_consequence": is_consequence(error),
        "is_timeout": is_timeout(error),
        "heartbeat": failed.heartbeat,
    }


def _exit_code(error: BaseException) -> int | None:
    if not isinstance(error, SystemExit):
        return None
    code = 0 if error.code is None else error.code
    return code & 0xFF if isinstance(code, int) else 1  # as the kernel reports it


def _traceback_of(error: BaseException, message: str) -> str:
    """Return the traceback from the first frame of user code on, or all of it if it has no such frame."""
    start = error.__traceback__
    while start is not None and _is_library(start.tb_frame):
        start = start.tb_next
    start = error.__traceback__ if start is None else start
    # Source lines come from the user's import loaders.
    text = NO_TEXT
    if message is not NO_TEXT:
        first = chain_of(error)[-1]  # read here: `text_of` formats in a thread
        text = text_of(error, lambda error: _formatted(error, start, first))
    if text is not NO_TEXT:
        return text
    lines = ["Traceback (most recent call last):"]
    for frame, number in traceback.walk_tb(start):
        lines.append(f'  File "{frame.f_code.co_filename}", line {number}, in {frame.f_code.co_name}')
    return "\n".join([*lines, f"{type(error).__name__}: {message}", ""])


def _formatted(error: BaseException, start: TracebackType | None, first: BaseException) -> str:
    """Return Python's text of a traceback that begins with `first`, not with what the caller is handling."""
    attribute = BaseException.__dict__["__context__"]  # the user's class may have another one
    context = attribute.__get__(first)
    attribute.__set__(first, None)
    try:
        return "".join(traceback.format_exception(type(error), error, start))
    finally:
        attribute.__set__(first, context)


def _is_library(frame: FrameType) -> bool:
    is_torch = str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
    return is_torch or path_in_package(frame.f_code.co_filename) is not None


@final
@dataclass(eq=False, repr=False)
class FailureCollector:
    """The failures that ranks have reported, and the ends of processes that the supervisor has seen."""

    workers: Sequence[MonitoredRank]  # the supervisor's list of all local ranks
    on_failure: Callable[[FailureRecord], None] | None = None  # called with each record
    # The global ranks that the supervisor stopped after the first failure.
    stopped: list[int] = field(default_factory=list, init=False)
    # Of ranks whose script has ended by itself, which is a failure where others need them.
    exited: list[FailureRecord] = field(default_factory=list, init=False)
    _records: list[FailureRecord] = field(default_factory=list, init=False)
    _late: list[FailureRecord] = field(default_factory=list, init=False)
    _stopped_at: dict[int, str] = field(default_factory=dict, init=False)  # tracebacks, by global rank
    _started_s: float = field(default_factory=time.monotonic, init=False)
    _heartbeats: dict[MonitoredRank, Heartbeat] = field(default_factory=dict, init=False)

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, record: FailureRecord) -> None:
        """Add a record; at the first timeout, read all heartbeats."""
        if record.exception_type == "JobStopped":  # after STOP, of which the cause is another record
            self._stopped_at[record.global_rank] = record.traceback_text
            return
        if any(dataclasses.replace(record, at_s=other.at_s) == other for other in self._records):
            return  # another node's failure, which several ranks here report
        self._records.append(record)
        if self.on_failure is not None:
            self.on_failure(record)
        if record.is_timeout and not self._heartbeats:
            # No rank is stopped yet. The record of another rank that times out has its own heartbeat.
            self._heartbeats = {each: each.heartbeat.read() for each in self.workers if not each.has_ended}

    def add_late(self, record: FailureRecord) -> None:
        """Add the end of a process that left without a report while the ranks were being stopped.

        It is the cause where the others have only noticed that a rank had gone: under load the end of a
        process is seen later than the end of its connections. Elsewhere it is a consequence, in a line.
        """
        if self._records:
            self._late.append(record)
            if record.global_rank in self.stopped:
                self.stopped.remove(record.global_rank)

    def error(self) -> WorkerError | None:
        """Return the first failure as an exception, or None."""
        if not self._records:
            return None
        cause = first_cause(self._records)
        if cause.is_consequence and (left := [*self._late, *self.exited]):
            cause = first_cause(left)
        others = [record for record in (*self._records, *self._late) if record is not cause]
        cause = self._of_timeout(cause) if cause.is_timeout else cause
        stopped = [rank for rank in self.stopped if rank != cause.global_rank]  # reported late
        stopped_at = {rank: text for rank, text in self._stopped_at.items() if rank != cause.global_rank}
        return cause.to_error(self._started_s, stopped, others, stopped_at)

    def _of_timeout(self, cause: FailureRecord) -> FailureRecord:
        """Return a timeout's record with the missing ranks, and where each of the other ranks was.

        Where all ranks waited, the missing ones have not timed out: they hang or are suspended.
        Where all have timed out, they waited for each other in different collectives: all are missing.
        """
        own = {each.global_rank: each for each in self._records if each.is_timeout or each.is_consequence}
        waited = {rank for rank, record in own.items() if _waited_with(cause, record)}
        missing, last_seen = {*cause.missing} - waited, []
        others = {*cause.missing, *own} - {cause.global_rank}
        for worker in self.workers:
            rank = worker.ranks.global_rank
            heartbeat = own[rank].heartbeat if rank in own else self._heartbeats.get(worker)
            if rank != cause.global_rank and heartbeat is not None:
                last_seen.append(worker.status(heartbeat, cause.at_s))
                others.add(rank)
                has_come = rank in waited if rank in own else heartbeat.waited_at(cause.at_s)
                if not has_come:
                    missing.add(rank)
        seen = cause.last_seen or tuple(last_seen)
        missing = missing or {*others} - {*own} or others
        return dataclasses.replace(cause, missing=tuple(sorted(missing)), last_seen=seen)


def _waited_with(cause: FailureRecord, record: FailureRecord) -> bool:
    """Return whether a rank waited too when the first one timed out, as far as is known."""
    if record.heartbeat is not None and record.heartbeat.waits:
        return record.heartbeat.waited_at(cause.at_s)
    return record.is_timeout or record.at_s - cause.at_s < _AT_ONCE_S

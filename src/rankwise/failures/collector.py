"""Collect the failures of a job, and build the exception for the caller."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import final

from rankwise.errors import WorkerError
from rankwise.failures.record import FailureRecord, first_cause
from rankwise.monitoring.heartbeat import Heartbeat, MonitoredRank

# How soon a rank in a collective that has no phase of its own fails after another rank has.
_AT_ONCE_S = 0.2


@final
class FailureCollector:
    """The failures that ranks have reported, and the ends of processes that the supervisor has seen.

    `workers` is the supervisor's list of all local ranks; `on_failure` is called with each record.

    Attributes:
        stopped: the global ranks that the supervisor stopped after the first failure.
        exited: records of ranks whose script has ended by itself, which is a failure where others need them.
    """

    def __init__(
        self, workers: Sequence[MonitoredRank], on_failure: Callable[[FailureRecord], None] | None = None
    ) -> None:
        self.stopped: list[int] = []
        self.exited: list[FailureRecord] = []
        self._workers = workers
        self._on_failure = on_failure
        self._records: list[FailureRecord] = []
        self._late: list[FailureRecord] = []
        self._stopped_at: dict[int, str] = {}  # tracebacks, by global rank
        self._started_s = time.monotonic()
        self._heartbeats: dict[MonitoredRank, Heartbeat] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, record: FailureRecord) -> None:
        """Add a record; at the first timeout, read all heartbeats."""
        if (
            record.exception_type == "JobStopped"
        ):  # after STOP; the cause is what made the supervisor send that
            self._stopped_at[record.global_rank] = record.traceback_text
            return
        if any(record.is_same_failure(other) for other in self._records):
            return  # another node's failure, which several ranks here report
        self._records.append(record)
        if self._on_failure is not None:
            self._on_failure(record)
        if record.is_timeout and not self._heartbeats:
            # No rank is stopped yet. The record of another rank that times out has its own heartbeat.
            self._heartbeats = {each: each.heartbeat.read() for each in self._workers if not each.has_ended}

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
        for worker in self._workers:
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

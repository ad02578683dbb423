"""Failure records: how one rank failed, and which of several records is the first cause."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
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
from rankwise.monitoring.heartbeat import Heartbeat, failure_time_of
from rankwise.paths import path_in_package
from rankwise.ranks import RankInfo
from rankwise.stores.values import decoded

_LINE_LENGTH = 160


@final
@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure: an exception, or how its process ended.

    Attributes:
        at_s: when, by CLOCK_MONOTONIC, which is one clock for all processes of a node.
        exception_type: of the exception that the rank raised; empty where only `exit_status` is known.
        exit_status: of the process; a negative one is the signal that killed it. None where it is unknown,
            and where an exception ended the rank.
        phase: where in the job the process ended.
        missing: after a timeout, the global ranks that did not come.
        last_seen: after a timeout, where each other rank was.
        notes: what else to look at.
        is_consequence: whether another rank's failure, or the supervisor's stop, has caused this one.
        is_timeout: whether other ranks did not come in time, to a collective or in the store.
        heartbeat: this rank's own when it failed.
        has_met: whether this rank had met the ranks of other nodes, and so could publish its failure itself.
        host: the node's name; a record is made on the node of its rank.
    """

    global_rank: int
    local_rank: int
    node_rank: int
    pid: int
    at_s: float
    exception_type: str = ""
    exception_message: str = ""
    traceback_text: str = ""
    exit_status: int | None = None
    phase: str = "before it had finished"
    missing: tuple[int, ...] = ()
    last_seen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_consequence: bool = False
    is_timeout: bool = False
    heartbeat: Heartbeat | None = None
    has_met: bool = True
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def of_rank(cls, ranks: RankInfo, pid: int, **facts: Any) -> FailureRecord:
        """Describe how a rank failed; now, unless the facts have `at_s`."""
        facts = {"at_s": time.monotonic(), **facts}
        return cls(ranks.global_rank, ranks.local_rank, ranks.node_rank, pid, **facts)

    @classmethod
    def of_timeout(cls, ranks: RankInfo, pid: int, error: Exception) -> FailureRecord:
        """Describe a limit that the supervisor has seen pass; `ranks` are of a rank that it concerns."""
        facts = {"exception_type": type(error).__name__, "exception_message": str(error)}
        return cls.of_rank(ranks, pid, is_timeout=True, **facts)

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
        heartbeat = self.heartbeat
        if heartbeat is not None:
            heartbeat = dataclasses.replace(heartbeat, at_s=heartbeat.at_s + offset_s)
        return dataclasses.replace(self, at_s=self.at_s + offset_s, heartbeat=heartbeat, **facts)

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    def is_same_failure(self, other: FailureRecord) -> bool:
        """Return whether both are records of one end of one process."""
        return dataclasses.replace(self, at_s=other.at_s) == other

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
        facts: dict[str, Any] = {
            "global_rank": self.global_rank,
            "local_rank": self.local_rank,
            "node_rank": self.node_rank,
            "pid": self.pid,
            "host": self.host,
            "elapsed_s": max(0.0, self.at_s - started_s),
            "stopped": tuple(stopped),
            "consequences": tuple(other.line() for other in others if not self._is_like(other)),
            "alike": tuple(sorted(other.global_rank for other in others if self._is_like(other))),
            "traceback_text": self.traceback_text,
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
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1  # as the kernel reports it


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

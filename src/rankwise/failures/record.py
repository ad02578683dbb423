"""Failure records: what a rank reports of its own end, and which of several came first."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from rankwise.errors import (
    RankwiseError,
    WorkerError,
    WorkerExitedError,
    WorkerKilledError,
    WorkerRaisedError,
    WorkerTimedOutError,
    signal_name,
)
from rankwise.failures.classify import chain_of, is_propagated, text_of
from rankwise.monitoring.heartbeat import Heartbeat, failure_time_of
from rankwise.ranks import RankInfo

# As what torch raises the words of gloo, NCCL and the stores; these very types, none that derives from them.
_TORCHS_TYPES = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
# How they say that somebody else has gone. In an error of another type the same words are the user's own: a
# web service may refuse a connection, too.
_TORCHS_CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|remote process exited|socket closed"
    r"|store: \w+ of .* had no answer in|rank_zero_first\(\) failed on",
    re.IGNORECASE | re.DOTALL,
)
_CONSEQUENCES = {
    **dict.fromkeys((*_TORCHS_TYPES, "RankZeroFailedError"), _TORCHS_CONSEQUENCE),
    "JobStopped": re.compile(""),
}
# How they say that somebody else did not come in time, and how this package does.
_TORCHS_TIMEOUT = re.compile(
    r"timed out waiting \d+ ?ms for|wait timeout after \d+ ?ms|store: \w+ of .* had no answer in"
    r"|timed out after \d+ seconds waiting for clients|failed to pass monitoredBarrier in \d+ ms"
    r"|ran for \d+ milliseconds before timing out",
    re.IGNORECASE | re.DOTALL,
)
_TIMEOUTS = {
    **dict.fromkeys(_TORCHS_TYPES, _TORCHS_TIMEOUT),
    "RendezvousTimeoutError": re.compile(r"^Waited [\d.e+]+ s for "),
    "CollectiveMismatchError": re.compile(r"^Waited [\d.e+]+ s for "),
    "StopAgreementError": re.compile(r"did not say when"),
}
_LINE_LENGTH = 160


@final
@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure. `at_s` is CLOCK_MONOTONIC, one clock for all processes of a node.

    Exactly one of these says how: `exception_type` (it raised) or `exit_status` (it left; a negative one is
    the signal that killed it).
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
    missing: tuple[int, ...] = ()  # of one that waited in vain: who held it up
    last_seen: tuple[str, ...] = ()  # and where each is
    notes: tuple[str, ...] = ()  # what else a reader may look at
    is_propagated: bool = (
        False  # another rank has raised it; or user code has wrapped what reads like an echo
    )
    is_of_timeout: bool = False  # user code has wrapped what reads like a timeout
    heartbeat: Heartbeat | None = None  # where this rank was itself when it failed
    has_met: bool = True  # whether this rank could tell those of other nodes itself
    host: str = field(default_factory=socket.gethostname)  # a record is made on the node of its rank

    @classmethod
    def of_exception(cls, ranks: RankInfo, error: BaseException) -> FailureRecord:
        """Describe an exception that ended this rank's work; runs in that rank."""
        moment, led_here = failure_time_of(error), _what_led_to(error)
        return cls(
            **_place(ranks, os.getpid()) | {"at_s": moment.at_s, "heartbeat": moment.heartbeat},
            exception_type=type(error).__name__,
            exception_message=text_of(error),
            traceback_text=_traceback_of(error),
            exit_status=_exit_code(error),
            is_propagated=any(is_propagated(link) or _reads_like(_CONSEQUENCES, link) for link in led_here),
            is_of_timeout=any(_reads_like(_TIMEOUTS, link) for link in led_here),
        )

    @classmethod
    def of_waiting(cls, ranks: RankInfo, pid: int, error: Exception) -> FailureRecord:
        """Describe a rank that has waited in vain, and does not know; runs in the supervisor."""
        return cls(
            **_place(ranks, pid), exception_type=type(error).__name__, exception_message=text_of(error)
        )

    @classmethod
    def of_exit(cls, ranks: RankInfo, pid: int, status: int, phase: str) -> FailureRecord:
        """Describe a process that is gone; runs in the supervisor."""
        return cls(**_place(ranks, pid), exit_status=status, phase=phase)

    @classmethod
    def from_json(cls, payload: bytes) -> FailureRecord:
        """Read back what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(payload)
        for name in ("missing", "last_seen", "notes"):
            fields[name] = tuple(fields[name])
        if fields["heartbeat"] is not None:
            fields["heartbeat"] = Heartbeat(**fields["heartbeat"])
        return cls(**fields)

    def to_json(self) -> bytes:
        """Write the record for the channel."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @property
    def is_consequence(self) -> bool:
        """Whether this reads like the echo of another rank's end."""
        return self.is_propagated or _says(_CONSEQUENCES, self.exception_type, self.exception_message)

    @property
    def is_felt(self) -> bool:
        """Whether another rank's end ended what this rank did with it, and not the supervisor's word."""
        return self.is_consequence and self.exception_type != "JobStopped"

    @property
    def is_timeout(self) -> bool:
        """Whether this rank waited in vain for others, in a collective or at the store."""
        return self.is_of_timeout or _says(_TIMEOUTS, self.exception_type, self.exception_message)

    @property
    def is_of_user_code(self) -> bool:
        """Whether it is user code that speaks here, be it of what another rank's end has led to."""
        kind, text = self.exception_type, self.exception_message
        return bool(kind) and not (_says(_CONSEQUENCES, kind, text) or _says(_TIMEOUTS, kind, text))

    def is_same_failure(self, other: FailureRecord) -> bool:
        """Whether both are of the same end of the same process, told twice."""
        return dataclasses.replace(self, at_s=other.at_s) == other

    def _is_like(self, other: FailureRecord) -> bool:
        return bool(self.traceback_text) and self.traceback_text == other.traceback_text

    def line(self) -> str:
        """Return the record in one line."""
        if not self.exception_type:
            return f"global_rank {self.global_rank} {self._how_it_left()}"
        what = f"{self.exception_type}: {self.exception_message}".partition("\n")[0]
        shortened = what if len(what) <= _LINE_LENGTH else f"{what[: _LINE_LENGTH - 3]}..."
        return f"global_rank {self.global_rank} raised {shortened}"

    def _how_it_left(self) -> str:
        if self.exit_status is None or self.exit_status >= 0:
            return f"exited with code {self.exit_status}"
        return f"was killed by {signal_name(-self.exit_status)}"

    def to_error(
        self,
        started_s: float,
        stopped: Sequence[int],
        others: Sequence[FailureRecord],
    ) -> WorkerError:
        """Build the exception for the caller."""
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
        }
        if self.exit_status is None:
            facts |= {"exception_type": self.exception_type, "exception_message": self.exception_message}
            if self.is_timeout:
                facts["missing"] = tuple(sorted({*self.missing} - {self.global_rank}))
                facts["last_seen"] = (*self.last_seen, *self.notes)
                return WorkerTimedOutError(**facts)
            return WorkerRaisedError(**facts)
        if self.exit_status < 0:
            return WorkerKilledError(**facts, signal_number=-self.exit_status)
        return WorkerExitedError(**facts, exit_code=self.exit_status, phase=self.phase)


def first_cause(records: Sequence[FailureRecord]) -> FailureRecord:
    """Return the earliest failure that is no mere consequence; the earliest of all where each is one."""
    return min(records, key=lambda record: (record.is_consequence, record.at_s))


def _place(ranks: RankInfo, pid: int) -> dict[str, Any]:
    return {
        "global_rank": ranks.global_rank,
        "local_rank": ranks.local_rank,
        "node_rank": ranks.node_rank,
        "pid": pid,
        "at_s": time.monotonic(),
    }


def _what_led_to(error: BaseException) -> list[BaseException]:
    """Return an error and what was raised before it; an error of this package knows what it is, without."""
    chain = chain_of(error)
    ours = [index for index, link in enumerate(chain) if isinstance(link, RankwiseError)]
    return chain[: ours[0] + 1] if ours else chain


def _reads_like(wording: Mapping[str, re.Pattern[str]], error: BaseException) -> bool:
    kind = type(error).__name__
    return kind in wording and _says(wording, kind, text_of(error))


def _says(wording: Mapping[str, re.Pattern[str]], kind: str, text: str) -> bool:
    return kind in wording and bool(wording[kind].search(text))


def _exit_code(error: BaseException) -> int | None:
    if not isinstance(error, SystemExit):
        return None
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1  # what of it comes to be known outside


def _traceback_of(error: BaseException) -> str:
    try:
        return _own_traceback(error)
    except Exception:  # noqa: BLE001  sources come from loaders, which are anybody's code
        lines = ["Traceback (most recent call last):"]
        for frame, number in traceback.walk_tb(error.__traceback__):
            lines.append(f'  File "{frame.f_code.co_filename}", line {number}, in {frame.f_code.co_name}')
        return "\n".join([*lines, f"{type(error).__name__}: {text_of(error)}", ""])


def _own_traceback(error: BaseException) -> str:
    """Return the traceback from the user's code on; all of it where none of the user's code is in it."""
    report = traceback.TracebackException.from_exception(error)
    folders = _folders_on_the_way()
    is_way_in = [_resolved(frame.filename).startswith(folders) for frame in report.stack]
    if not all(is_way_in):
        del report.stack[: is_way_in.index(False)]
    return "".join(report.format())


def _folders_on_the_way() -> tuple[str, ...]:
    """Return where the code lies that leads to the user's: rankwise, and torch where it is loaded."""
    folders = [Path(_resolved(__file__)).parents[1]]
    if torch := sys.modules.get("torch"):
        folders.append(Path(_resolved(str(torch.__file__))).parent)
    return tuple(f"{folder}{os.sep}" for folder in folders)


def _resolved(filename: str) -> str:
    """Return where a file is; its name as it is where it is none ("<string>") or has no place any more."""
    if filename.startswith("<"):
        return filename
    try:
        return str(Path(filename).resolve())
    except (OSError, RuntimeError):  # the working directory is gone; links in a circle
        return filename

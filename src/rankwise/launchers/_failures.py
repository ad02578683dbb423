"""The failures of a job, and the exception that tells them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from typing_extensions import final

from rankwise.errors import WorkerError
from rankwise.launchers._member import Member
from rankwise.launchers._records import FailureRecord, first_cause


@final
class Failures:
    """What the ranks of a job have reported, or were seen to end with.

    Args:
        members: all local ranks; the list is the supervisor's.
        on_failure: called with each.

    Attributes:
        stopped: the global ranks that were told to stop after the first failure.
    """

    def __init__(
        self, members: Sequence[Member], on_failure: Callable[[FailureRecord], None] | None = None
    ) -> None:
        self.stopped: list[int] = []
        self._members = members
        self._on_failure = on_failure
        self._records: list[FailureRecord] = []
        self._started_s = time.monotonic()
        self._missing: tuple[int, ...] = ()
        self._last_seen: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._records)

    def add(self, record: FailureRecord) -> None:
        """Take one more; of the first that is a timeout, note who was not there, and where everybody is."""
        if any(record.is_same_failure(other) for other in self._records):
            return  # of another node, of which several ranks here have heard
        self._records.append(record)
        if self._on_failure is not None:
            self._on_failure(record)
        if record.is_timeout and not self._last_seen:
            others = [each for each in self._members if each.ranks.global_rank != record.global_rank]
            others = [each for each in others if not each.has_ended]
            missing = [member for member in others if not member.pulse.read().waited_at(record.at_s)]
            self._missing = tuple(member.ranks.global_rank for member in missing)
            self._last_seen = tuple(member.whereabouts() for member in others)

    def reason(self) -> str:
        """Return the first failure in a line; without one, why ranks are told to stop all the same."""
        return self._records[0].line() if self._records else "the main process was told to end"

    def error(self) -> WorkerError | None:
        """Return the first failure as an exception, or None."""
        if not self._records:
            return None
        cause = first_cause(self._records)
        others = [record for record in self._records if record is not cause and record.exception_type]
        others = [record for record in others if record.exception_type != "JobStopped"]
        seen = (self._missing, self._last_seen) if cause.is_timeout else ((), ())
        return cause.to_error(self._started_s, self.stopped, others, *seen)

"""See that a job comes to its end: a rank that hangs in its teardown or after it, where nothing times out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from rankwise.errors import RendezvousTimeoutError
from rankwise.monitoring.heartbeat import LEAVING, TEARDOWN
from rankwise.monitoring.monitored_rank import MonitoredRank

# How many looks there are in the time that a teardown may take.
_LOOKS = 8
# What a process has at least for its way out: threads and exit hooks that end, an interpreter to take down.
LEAST_TO_LEAVE_S = 30.0


@final
class TeardownTimeout:
    """Look now and then for a rank whose teardown takes longer than a collective may, or its way out.

    What a rank does before its teardown may take as long as it likes, also when the others have finished; and
    so may what a script that is run as a rank does after its jobs.

    Args:
        members: all local ranks; the list is the supervisor's, and grows.
        timeout_s: how long a teardown may take; None for as long as it likes.
        on_timeout: called with the failure of the rank that waits in vain.
    """

    def __init__(
        self,
        workers: Sequence[MonitoredRank],
        timeout_s: float | None,
        on_timeout: Callable[[MonitoredRank, Exception], None],
    ) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._next_look_s = 0.0

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for never."""
        return None if self._timeout_s is None else max(0.0, self._next_look_s - time.monotonic())

    def look(self) -> None:
        """Report the ranks that hang, once, if it is time to look."""
        if self._timeout_s is None or self.time_left():
            return
        interval_s = self._timeout_s / _LOOKS
        was_suspended = time.monotonic() > self._next_look_s + interval_s  # and the ranks perhaps with us
        self._next_look_s = time.monotonic() + interval_s
        if was_suspended:
            return
        hanging = [member for member in self._workers if self._hangs(member, self._timeout_s)]
        if hanging:
            waiting = [member for member in self._workers if member not in hanging]
            witness = (waiting or hanging)[0]
            error = RendezvousTimeoutError("the end of the job", self._timeout_s)
            self._timeout_s = None
            self._on_timeout(witness, error)

    @staticmethod
    def _hangs(member: MonitoredRank, timeout_s: float) -> bool:
        heartbeat = member.heartbeat.read()
        limit_s = {TEARDOWN: timeout_s, LEAVING: max(timeout_s, LEAST_TO_LEAVE_S)}.get(heartbeat.phase)
        return limit_s is not None and not member.has_ended and heartbeat.seconds_ago() > limit_s

"""Time limits for the end of a job: for a rank's teardown, and for its process to exit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from rankwise.errors import RendezvousTimeoutError
from rankwise.monitoring.heartbeat import LEAVING, TEARDOWN, MonitoredRank

# How many times the ranks are looked at in the time that a teardown may take.
_LOOKS = 8
# What a process has at least to exit: to end threads, run exit hooks and take down the interpreter.
LEAST_TO_LEAVE_S = 30.0


@final
class TeardownTimeout:
    """Find a rank whose teardown takes longer than a collective may, or whose process does not exit.

    What a rank does before its teardown has no limit, also when the others have finished; nor has what a
    re-run script does after its jobs.

    Args:
        workers: all local ranks; the list is the supervisor's, and grows.
        timeout_s: how long a teardown may take; None for no limit.
        on_timeout: called with the error, and a rank that waits for the one that hangs.
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
        # This process was suspended, and the ranks perhaps with it.
        was_suspended = time.monotonic() > self._next_look_s + interval_s
        self._next_look_s = time.monotonic() + interval_s
        if was_suspended:
            return
        hanging = [worker for worker in self._workers if self._hangs(worker, self._timeout_s)]
        if hanging:
            waiting = [worker for worker in self._workers if worker not in hanging]
            error = RendezvousTimeoutError("the end of the job", self._timeout_s)
            self._timeout_s = None
            self._on_timeout((waiting or hanging)[0], error)

    @staticmethod
    def _hangs(worker: MonitoredRank, timeout_s: float) -> bool:
        heartbeat = worker.heartbeat.read()
        limit_s = {TEARDOWN: timeout_s, LEAVING: max(timeout_s, LEAST_TO_LEAVE_S)}.get(heartbeat.phase)
        return limit_s is not None and not worker.has_ended and heartbeat.seconds_ago() > limit_s

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
    re-run script does after its jobs. `workers` is the supervisor's list, and grows. `on_timeout` is called
    once, with a rank that waits for the one that hangs, and the error. Call `look` every `interval_s`.
    """

    def __init__(
        self,
        workers: Sequence[MonitoredRank],
        timeout_s: float,
        on_timeout: Callable[[MonitoredRank, Exception], None],
    ) -> None:
        self.interval_s = timeout_s / _LOOKS
        self._workers = workers
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._last_look_s = time.monotonic()
        self._has_reported = False

    def look(self) -> None:
        """Report the ranks that hang."""
        ago_s, self._last_look_s = time.monotonic() - self._last_look_s, time.monotonic()
        if ago_s > 2 * self.interval_s:
            return  # this process was suspended, and the ranks perhaps with it
        hanging = [worker for worker in self._workers if self._hangs(worker)]
        if hanging and not self._has_reported:
            self._has_reported = True
            waiting = [worker for worker in self._workers if worker not in hanging]
            error = RendezvousTimeoutError("the end of the job", self._timeout_s)
            self._on_timeout((waiting or hanging)[0], error)

    def _hangs(self, worker: MonitoredRank) -> bool:
        heartbeat = worker.heartbeat.read()
        limits = {TEARDOWN: self._timeout_s, LEAVING: max(self._timeout_s, LEAST_TO_LEAVE_S)}
        limit_s = limits.get(heartbeat.phase)
        return limit_s is not None and not worker.has_ended and heartbeat.seconds_ago() > limit_s

"""Say which rank holds the others up, while it does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import final

from rankwise.launchers.worker_state import WorkerState
from rankwise.processes.stderr import write_stderr

# How many looks there are in the time after which a rank is reported.
_LOOKS = 4


@final
class StallMonitor:
    """Look at the ranks' heartbeats now and then; report who lags on stderr, again and again while it does.

    Args:
        members: all local ranks; the list is the supervisor's, and grows.
        warn_after_s: after how long in one phase a rank lags, if others wait meanwhile.
    """

    def __init__(self, workers: Sequence[WorkerState], warn_after_s: float) -> None:
        self._workers = workers
        self._warn_after_s = warn_after_s
        self._next_look_s = time.monotonic() + warn_after_s / _LOOKS
        self._reported: dict[int, float] = {}
        self._leaving_since_s: float | None = None

    def expect_exit(self) -> None:
        """Report, from now on, who has not left yet: the work is done, and the main process waits."""
        if self._leaving_since_s is None:
            self._leaving_since_s = time.monotonic()

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for a rank that is alone."""
        return None if len(self._workers) < 2 else max(0.0, self._next_look_s - time.monotonic())

    def look(self) -> None:
        """Report, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._warn_after_s / _LOOKS
        if self._leaving_since_s is not None:
            if now_s - self._leaving_since_s >= self._warn_after_s:
                self._report(_still_there(self._workers), "The main process waits for it to leave.")
            return
        lagging = laggards(self._workers, self._warn_after_s)
        others = [other for other in self._workers if other not in lagging]
        self._report(lagging, f"The others wait: {joined(others)}.")

    def _report(self, workers: Sequence[WorkerState], who_waits: str) -> None:
        now_s = time.monotonic()
        for member in workers:
            rank = member.ranks.global_rank
            if now_s - self._reported.get(rank, 0.0) >= self._warn_after_s:
                self._reported[rank] = now_s
                write_stderr(f"rankwise: {member.status()}. {who_waits}\n")


def laggards(workers: Sequence[WorkerState], after_s: float) -> list[WorkerState]:
    """Return the ranks that have been in one phase for that long, while others wait or are further on."""
    heartbeats = [(member, member.heartbeat.read()) for member in workers if not member.has_ended]
    return [
        member
        for member, heartbeat in heartbeats
        if not heartbeat.waits
        and heartbeat.seconds_ago() > after_s
        and any(other.waits_for(heartbeat) for _, other in heartbeats)
    ]


def _still_there(workers: Sequence[WorkerState]) -> list[WorkerState]:
    return [member for member in workers if member.process is not None and not member.has_ended]


def joined(workers: Iterable[WorkerState]) -> str:
    """Return where ranks are, in one line."""
    return "; ".join(member.status() for member in workers)

"""A local rank as the process that supervises it sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rankwise.monitoring.heartbeat import Heartbeat, HeartbeatReader
from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo


@dataclass(eq=False)
class MonitoredRank:
    """A local rank: its process, its heartbeat, and whether it still runs.

    Attributes:
        process: None for the rank that runs in the supervising process.
    """

    ranks: RankInfo
    process: StartedProcess | None
    heartbeat: HeartbeatReader
    has_started: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)

    def status(self) -> str:
        """Return the phase that the rank is in and for how long, in one line."""
        return self.status_at(self.heartbeat.read(), time.monotonic())

    def status_at(self, heartbeat: Heartbeat, at_s: float) -> str:
        """Return the phase in one of the rank's heartbeats, and for how long at a monotonic time."""
        name = f"global_rank={self.ranks.global_rank}"
        if not self.has_started and not heartbeat.at_s:
            return f"{name} has not started yet"
        return f"{name} was last in {heartbeat.where()}, {max(0.0, heartbeat.seconds_ago(at_s)):.0f} s ago"

"""One local rank in the supervisor's book."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import final

from rankwise.errors import WorkerExitedError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import FrameReader
from rankwise.monitoring.heartbeat import Heartbeat, HeartbeatReader
from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo


@final
@dataclass(eq=False)
class WorkerState:
    """A rank: its channel, its process where it has one of its own, and how far it is."""

    ranks: RankInfo
    sock: socket.socket
    process: StartedProcess | None
    heartbeat: HeartbeatReader
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: bytearray = field(default_factory=bytearray)
    has_started: bool = False
    has_failed: bool = False
    has_ended: bool = False
    has_stopped: bool = False
    is_in_loop: bool = False
    jobs_done: int = 0
    exit_status: int = 0  # of one that has ended

    def has_data(self) -> bool:
        """Whether something that the rank has sent is still unread."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def has_left(self, job: int) -> bool:
        """Whether the rank is at work no more: its process has ended, or its job in the main process."""
        is_idle = self.process is None and (self.has_failed or self.jobs_done >= job)
        return self.has_ended or is_idle

    def status(self) -> str:
        """Return what the rank was last doing, and since when, in a line."""
        return self.seen_in(self.heartbeat.read(), time.monotonic())

    def seen_in(self, heartbeat: Heartbeat, at_s: float) -> str:
        """Return the phase in a heartbeat of the rank, and for how long at a monotonic time."""
        name = f"global_rank={self.ranks.global_rank}"
        if not self.has_started and not heartbeat.at_s:
            return f"{name} has not started yet"
        return f"{name} was last in {heartbeat.where()}, {max(0.0, heartbeat.seconds_ago(at_s)):.0f} s ago"

    def end(self, phase: str) -> FailureRecord:
        """Return the record of a rank whose process is gone."""
        pid = 0 if self.process is None else self.process.pid
        return FailureRecord.of_exit(self.ranks, pid, self.exit_status, phase)

    def phase(self, is_in_job: bool) -> str:
        """Return, for a rank that has left, when it did."""
        if not self.has_started:
            return WorkerExitedError.NOT_STARTED
        return "before it had finished" if is_in_job else "after it had finished its part"

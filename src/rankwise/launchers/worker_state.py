"""What the supervisor keeps of one local rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import final

from rankwise.errors import WorkerExitedError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import FrameReader
from rankwise.monitoring.heartbeat import MonitoredRank


@final
@dataclass(eq=False)
class WorkerState(MonitoredRank):
    """A local rank, its channel, and how far it is."""

    sock: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: bytearray = field(default_factory=bytearray)
    has_failed: bool = False
    has_stopped: bool = False
    is_in_loop: bool = False
    jobs_done: int = 0
    exit_status: int = 0  # of one that has ended

    def has_data(self) -> bool:
        """Return whether the channel has unread bytes."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def has_left(self, job: int) -> bool:
        """Return whether the rank's process, or its job in the main process, has ended."""
        is_idle = self.process is None and (self.has_failed or self.jobs_done >= job)
        return self.has_ended or is_idle

    def end(self, phase: str) -> FailureRecord:
        """Return the record of a rank whose process has ended."""
        return FailureRecord.of_rank(self.ranks, self.pid, exit_status=self.exit_status, phase=phase)

    def phase(self, is_in_job: bool) -> str:
        """Return at which point of the job the rank's process ended."""
        if not self.has_started:
            return WorkerExitedError.NOT_STARTED
        return "before it had finished" if is_in_job else "after it had finished its part"

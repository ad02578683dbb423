"""End the ranks of a job: the word, the grace, SIGKILL; a checkpoint that is being written is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from rankwise.failures.collector import FailureCollector
from rankwise.launchers.channel import Kind
from rankwise.launchers.worker_state import WorkerState
from rankwise.processes.event_loop import Timers
from rankwise.processes.stderr import write_stderr

# How often, at most, to look whether a checkpoint has been written.
_SHORTEST_LOOK_S = 0.1


@final
class ShutdownSequence:
    """What the supervisor does once its ranks have to go.

    Args:
        members: all local ranks; the list is the supervisor's, and grows.
        failures: why.
        timers: whose deadline is set from then on.
        send: sends a rank a frame.
        grace_period_s: how long a rank that was told to stop has before it is killed.
        saving_timeout_s: how long, at most, one has whose checkpoints a thread still writes; None for as long
            as that takes.

    Attributes:
        has_begun: whether the ranks have been told; an end of theirs is no failure any more.
    """

    def __init__(
        self,
        workers: Sequence[WorkerState],
        failures: FailureCollector,
        timers: Timers,
        send: Callable[[WorkerState, Kind, bytes], None],
        grace_period_s: float,
        saving_timeout_s: float | None,
    ) -> None:
        self._workers = workers
        self._failures = failures
        self._timers = timers
        self._send = send
        self._grace_period_s = grace_period_s
        self._saving_timeout_s = saving_timeout_s
        self._began_s = 0.0
        self._has_told_of_saving = False
        self.has_begun = False

    def begin(self, job: int) -> None:
        """Tell the ranks to leave, once; those that are still there after the grace are killed.

        Args:
            job: the number of the job, whose ranks that are not done yet are noted as stopped.
        """
        if self.has_begun:
            return
        self.has_begun = True
        self._began_s = time.monotonic()
        reason = self._failures.reason().encode(errors="backslashreplace")
        for member in self._workers:
            if not member.has_failed and not member.has_ended and member.jobs_done < max(1, job):
                self._failures.stopped.append(member.ranks.global_rank)
            self._send(member, Kind.STOP, reason)
            if member.process is not None and member.process.is_stopped():
                member.process.kill()  # it cannot hear the word
        self._timers.set(self._grace_period_s, self._end_grace)

    def kill(self) -> None:
        """Kill all that are left, whatever they are doing."""
        self.has_begun = True
        self._kill_but(())
        self._timers.set(self._grace_period_s, self._tell_that_main_is_busy)

    def _end_grace(self) -> None:
        saving = self._saving()
        if not saving:
            self.kill()
            return
        self._kill_but(saving)
        if not self._has_told_of_saving:
            self._has_told_of_saving = True
            ranks = ", ".join(str(member.ranks.global_rank) for member in saving)
            write_stderr(f"rankwise: the job ends when global_rank={ranks} has written its checkpoint.\n")
        self._timers.set(max(_SHORTEST_LOOK_S, self._grace_period_s), self._end_grace)

    def _saving(self) -> list[WorkerState]:
        limit_s = self._saving_timeout_s
        if limit_s is not None and time.monotonic() - self._began_s > limit_s:
            return []
        return [
            member
            for member in self._workers
            if member.process is not None and not member.has_ended and member.heartbeat.is_saving()
        ]

    def _kill_but(self, spared: Sequence[WorkerState]) -> None:
        for member in self._workers:
            if member.process is not None and not member.has_ended and member not in spared:
                member.process.kill()

    def _tell_that_main_is_busy(self) -> None:
        # Only rank 0 in the main process itself can still be at work, in a C call that nothing can cut.
        if error := self._failures.error():
            write_stderr(f"rankwise: {error}\n  (raised when rank 0's present call returns)\n")

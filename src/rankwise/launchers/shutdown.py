"""End the ranks of a job: STOP, the grace period, SIGKILL; wait for checkpoints that are being written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from rankwise.failures.collector import FailureCollector
from rankwise.launchers.channel import Kind
from rankwise.launchers.worker_state import WorkerState
from rankwise.processes.event_loop import EventLoop
from rankwise.processes.stderr import write_stderr

# The shortest pause between two checks whether a checkpoint has been written.
_SHORTEST_PAUSE_S = 0.1


@final
class ShutdownSequence:
    """Ends the ranks of a supervisor.

    Args:
        workers: all local ranks; the list is the supervisor's, and grows.
        failures: the failures of the job.
        loop: the supervisor's; its deadline is used from then on.
        send: sends a frame to a rank.
        grace_period_s: how long a rank has after STOP before it is killed.
        saving_timeout_s: how long a rank has whose thread still writes a checkpoint; None for no limit.

    Attributes:
        has_begun: whether STOP has been sent; a rank that ends afterwards has not failed.
    """

    def __init__(
        self,
        workers: Sequence[WorkerState],
        failures: FailureCollector,
        loop: EventLoop,
        send: Callable[[WorkerState, Kind, bytes], None],
        grace_period_s: float,
        saving_timeout_s: float | None,
    ) -> None:
        self._workers = workers
        self._failures = failures
        self._loop = loop
        self._send = send
        self._grace_period_s = grace_period_s
        self._saving_timeout_s = saving_timeout_s
        self._began_s = 0.0
        self._has_reported_saving = False
        self.has_begun = False

    def begin(self, job: int) -> None:
        """Send STOP, once; kill the ranks that are still there after the grace period.

        Args:
            job: the number of the job; its ranks that are not done yet are recorded as stopped.
        """
        if self.has_begun:
            return
        self.has_begun = True
        self._began_s = time.monotonic()
        reason = self._failures.reason().encode(errors="backslashreplace")
        for worker in self._workers:
            if not worker.has_failed and not worker.has_ended and worker.jobs_done < max(1, job):
                self._failures.stopped.append(worker.ranks.global_rank)
            self._send(worker, Kind.STOP, reason)
            if worker.process is not None and worker.process.is_stopped():
                worker.process.kill()  # it would not react
        self._loop.call_later(self._grace_period_s, self._end_grace)

    def kill(self) -> None:
        """Kill all that are left."""
        self.has_begun = True
        self._kill_but(())
        self._loop.call_later(self._grace_period_s, self._report_busy_main)

    def _end_grace(self) -> None:
        saving = self._saving()
        if not saving:
            self.kill()
            return
        self._kill_but(saving)
        if not self._has_reported_saving:
            self._has_reported_saving = True
            ranks = ", ".join(str(worker.ranks.global_rank) for worker in saving)
            write_stderr(f"rankwise: the job ends when global_rank={ranks} has written its checkpoint.\n")
        self._loop.call_later(max(_SHORTEST_PAUSE_S, self._grace_period_s), self._end_grace)

    def _saving(self) -> list[WorkerState]:
        limit_s = self._saving_timeout_s
        if limit_s is not None and time.monotonic() - self._began_s > limit_s:
            return []
        return [
            worker
            for worker in self._workers
            if worker.process is not None and not worker.has_ended and worker.heartbeat.is_saving()
        ]

    def _kill_but(self, spared: Sequence[WorkerState]) -> None:
        for worker in self._workers:
            if worker.process is not None and not worker.has_ended and worker not in spared:
                worker.process.kill()

    def _report_busy_main(self) -> None:
        # Only rank 0 in the main process itself can still be at work, in a C call that nothing interrupts.
        if error := self._failures.error():
            write_stderr(f"rankwise: {error}\n  (raised when rank 0's present call returns)\n")

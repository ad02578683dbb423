"""The supervisor: one thread of the launching process that serves, watches and ends the ranks.

It waits, without polling, on the channels of all ranks and on the ends of the processes that it was given.
"""

from __future__ import annotations

import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import final

from rankwise.errors import WorkerError
from rankwise.failures.collector import FailureCollector
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import Kind, frame, split_id, with_id
from rankwise.launchers.shutdown import ShutdownSequence
from rankwise.launchers.worker_state import WorkerState
from rankwise.monitoring.heartbeat import HeartbeatReader
from rankwise.monitoring.monitored_rank import MonitoredRank
from rankwise.monitoring.stacks import STACKS_SIGNAL, dump_stacks
from rankwise.monitoring.stragglers import LocalStragglerMonitor
from rankwise.monitoring.teardown_timeout import TeardownTimeout
from rankwise.processes import fork_safety
from rankwise.processes.event_loop import Timers, Wakeup
from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo
from rankwise.stores.private import StoreTable

_CHUNK = 1 << 16
# After a failure that reads like the echo of another, how long the other has to show itself.
_SETTLE_S = 0.5


@final
class Supervisor:
    """Watch the local ranks of one group through one job or several.

    Args:
        grace_period_s: how long a rank that was told to stop has before it is killed.
        stop_signals: what makes ranks that train stop at a boundary; otherwise it ends the job at once.
        stall_warning_s: after how long in one phase a rank is reported that others wait for.
        teardown_timeout_s: how long a rank's teardown may take, or a checkpoint that it writes when it is to
            leave; None for as long as it likes.
        on_failure: called in the supervisor's thread with each failure, for those elsewhere.

    A job is `begin_job`, then `wait_job`. All state is touched by the supervisor's thread alone; the public
    methods hand it their wishes.
    """

    def __init__(
        self,
        grace_period_s: float,
        stop_signals: Iterable[int] = (signal.SIGTERM,),
        stall_warning_s: float = 60.0,
        teardown_timeout_s: float | None = None,
        on_failure: Callable[[FailureRecord], None] | None = None,
    ) -> None:
        self._stop_signals = frozenset(stop_signals)
        self._ending_signals = self._stop_signals | {signal.SIGTERM, signal.SIGHUP}
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup(self._ending_signals, STACKS_SIGNAL)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        fork_safety.close_in_child(self._selector)
        self._workers: list[WorkerState] = []
        self._table = StoreTable()
        self._failures = FailureCollector(self._workers, on_failure)
        self._stalls = LocalStragglerMonitor(self._workers, stall_warning_s)
        self._timers = Timers(
            self._stalls, TeardownTimeout(self._workers, teardown_timeout_s, self._on_teardown_timeout)
        )
        self._shutdown = ShutdownSequence(
            self._workers, self._failures, self._timers, self._send, grace_period_s, teardown_timeout_s
        )
        self.was_interrupted = False
        self.ended_by: int | None = None  # a signal that ended the job at once
        self._stopped_by: int | None = None  # a signal for which training has stopped
        self._has_asked = False
        self._crash: BaseException | None = None
        self._is_closed = False
        self._job = 0
        self._has_to_exit = False
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankwise-supervisor", daemon=True)

    # ------------------------------------------------------------------ for the launching thread

    def add(
        self, ranks: RankInfo, sock: socket.socket, process: StartedProcess | None, heartbeat: HeartbeatReader
    ) -> None:
        """Take charge of a local rank: this end of its channel, and its process (None: this very one).

        Must be called before `start`.
        """
        sock.setblocking(False)
        fork_safety.close_in_child(sock)
        self._workers.append(WorkerState(ranks, process, heartbeat, sock))

    def start(self) -> None:
        """Begin to watch."""
        for member in self._workers:
            self._selector.register(member.sock, selectors.EVENT_READ, member)
            if member.process is not None:
                self._selector.register(member.process, selectors.EVENT_READ, member)
        self._thread.start()

    def begin_job(self, until_exit: bool) -> None:
        """Begin the next job; `until_exit`: it is over when the processes have left, not when done."""

        def begin() -> None:
            self._job += 1
            self._has_to_exit = until_exit
            self._settled.clear()
            for member in self._workers:
                if member.has_ended and not member.has_failed:
                    self._on_early_end(member, "before the next job began")
            self._check()

        self._settled.clear()
        self._wakeup.call_soon(begin)

    def wait_job(self) -> None:
        """Wait for the end of the job.

        Raises:
            WorkerError: when a rank failed; by then no started process is left.
            SystemExit: when a signal has ended the job, or made it stop.
        """
        self._settled.wait()
        if self._crash is not None:
            raise RuntimeError(
                "the supervisor of the job failed, which is a defect of rankwise"
            ) from self._crash
        if self.ended_by is not None:
            raise SystemExit(128 + self.ended_by)
        if error := self.error():
            try:
                raise error
            finally:
                del error  # or it lives in a cycle, through its traceback, until garbage is collected
        if self._stopped_by is not None:
            raise SystemExit(128 + self._stopped_by)

    def begin_exit(self) -> None:
        """Expect the ranks to leave by themselves now; `wait_job` waits until they have."""
        self._settled.clear()

        def begin() -> None:
            self._has_to_exit = True
            self._settled.clear()
            self._check()

        self._wakeup.call_soon(begin)

    def release(self) -> None:
        """Tell the ranks that the job is over for all of them."""

        def say_over() -> None:
            for member in self._workers:
                self._send(member, Kind.OVER, b"")

        self._wakeup.call_soon(say_over)

    def end_all(self) -> None:
        """End all ranks: the word, the grace, SIGKILL; wait until they are gone. A Ctrl-C skips the grace."""
        if self._crash is not None:
            return
        if not self._thread.is_alive():
            self.start()
        self._settled.clear()
        self._wakeup.call_soon(self._stop_all)
        try:
            self._settled.wait()
        except KeyboardInterrupt:
            self._wakeup.call_soon(self._kill_all)
            self._settled.wait()

    def handle_signals(self) -> AbstractContextManager[None]:
        """Act on Ctrl-C, SIGTERM and SIGHUP at once, also where a rank 0 in this process is in a C call.

        Such a rank waits in a collective: its peers must end first. See `Wakeup.handle_signals`.
        """
        return self._wakeup.handle_signals()

    def all_ended(self) -> bool:
        """Whether every started process is gone."""
        return all(member.has_ended for member in self._workers if member.process is not None)

    def error(self) -> WorkerError | None:
        """Return the first failure as an exception, or None."""
        return self._failures.error()

    def close(self) -> None:
        """End the thread and let go of everything; the processes must be gone."""
        if self._is_closed:
            return
        if self._thread.is_alive():
            self._wakeup.call_soon(self._mark_closed)
            self._thread.join()
        self._is_closed = True
        fork_safety.forget(self._selector, *(member.sock for member in self._workers))
        for member in self._workers:
            member.sock.close()
            if member.process is not None:
                member.process.close()
        self._selector.close()
        self._wakeup.close()

    # ------------------------------------------------------------------ the thread

    def _mark_closed(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, events in self._selector.select(self._timers.time_left()):
                    self._dispatch(key, events)
                self._timers.run()
        except BaseException as error:  # noqa: BLE001  a job without a supervisor must not go on, nor wait
            self._crash = error
            self._shutdown.has_begun = True
            for member in self._workers:
                if member.process is not None and not member.has_ended:
                    member.process.kill()
                    member.process.wait()
            self._settled.set()

    def _dispatch(self, key: selectors.SelectorKey, events: int) -> None:
        member: WorkerState | None = key.data
        if member is None:
            self._wakeup.run_pending(self._on_signals)
        elif key.fileobj is member.process:
            self._on_process_end(member)
        else:
            if events & selectors.EVENT_WRITE:
                self._flush(member)
            if events & selectors.EVENT_READ:
                self._read(member)

    def _on_signals(self, numbers: bytes) -> None:
        """Take note of the signals that this process has caught."""
        for number in numbers:
            if number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
                self.was_interrupted = True
                self._stop_or_kill()
            elif number == STACKS_SIGNAL:
                dump_stacks(self._workers, "SIGUSR2 was sent to the main process")
            elif number in self._stop_signals and not self._has_asked and self._ask_to_stop(number):
                self._has_asked = True
            elif number in self._ending_signals:
                self.ended_by = number
                self._stop_or_kill()

    def _ask_to_stop(self, number: int) -> bool:
        """Ask a rank that trains to stop with the others at a boundary; return whether there is one."""
        asked = next((member for member in self._workers if member.is_in_loop and not member.has_ended), None)
        if asked is not None:
            self._send(asked, Kind.REQUEST, b"%d" % number)
        return asked is not None

    def _stop_or_kill(self) -> None:
        if self._shutdown.has_begun:
            self._kill_all()
        else:
            self._stop_all()

    def _read(self, member: WorkerState) -> None:
        try:
            data = member.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if member.sock in self._selector.get_map():
                self._selector.unregister(member.sock)
                if member.process is None:  # rank 0, in the main process, has given up
                    member.has_ended = True
                    self._stop_all()
            return
        for kind, payload in member.reader.feed(data):
            self._receive(member, kind, payload)

    def _receive(self, member: WorkerState, kind: Kind, payload: bytes) -> None:
        if kind is Kind.HELLO:
            member.has_started = True
        elif kind is Kind.DONE:
            member.jobs_done += 1
            self._check()
        elif kind is Kind.IN_LOOP:
            member.is_in_loop = payload == b"1"
        elif kind is Kind.STOPPED:
            member.has_stopped = True
            member.jobs_done += 1
            self._stopped_by = int(payload)
            self._check()
        elif kind in (Kind.FAILURE, Kind.ELSEWHERE):
            member.has_failed |= kind is Kind.FAILURE
            self._on_failure(FailureRecord.from_json(payload))
        elif kind is Kind.STORE_REQUEST:
            request_id, request = split_id(payload)
            self._table.handle(
                request, lambda answer: self._send(member, Kind.STORE_REPLY, with_id(request_id, answer))
            )

    def _send(self, member: WorkerState, kind: Kind, payload: bytes) -> None:
        member.outgoing += frame(kind, payload)
        self._flush(member)

    def _flush(self, member: WorkerState) -> None:
        """Write what the channel takes now; the rest when it is writable, so that no rank can block us."""
        if member.sock not in self._selector.get_map():
            return
        try:
            while member.outgoing:
                del member.outgoing[: member.sock.send(member.outgoing)]
        except BlockingIOError:
            pass  # full: EVENT_WRITE below brings us back
        except OSError:
            member.outgoing.clear()  # the rank is gone; its end is told by its process
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.outgoing else 0)
        self._selector.modify(member.sock, interest, member)

    # ------------------------------------------------------------------ ends and failures

    def _on_process_end(self, member: WorkerState) -> None:
        process = member.process
        if process is None:
            return
        self._selector.unregister(process)
        while member.sock in self._selector.get_map() and member.has_data():
            self._read(member)
        member.exit_status = process.wait()
        member.has_ended = True
        is_in_job = self._job > 0 and member.jobs_done < self._job
        is_expected = member.has_failed or member.has_stopped or self._shutdown.has_begun
        if (member.exit_status != 0 or is_in_job) and not is_expected:
            self._on_early_end(member, member.phase(is_in_job))
        elif member.exit_status < 0 and not (process.was_killed or member.has_failed):
            self._failures.add_late(member.end(member.phase(is_in_job)))
        self._check()

    def _on_early_end(self, member: WorkerState, phase: str) -> None:
        member.has_failed = True
        self._on_failure(member.end(phase))

    def _on_failure(self, record: FailureRecord) -> None:
        self._failures.add(record)
        if record.is_timeout and not self._shutdown.has_begun:
            dump_stacks(self._workers, "a rank waited too long")
        if self._shutdown.has_begun:
            self._check()
        elif record.is_consequence:
            if not self._timers.is_set:
                self._timers.set(_SETTLE_S, self._stop_all)
        else:
            self._stop_all()

    def _on_teardown_timeout(self, witness: MonitoredRank, error: Exception) -> None:
        pid = 0 if witness.process is None else witness.process.pid
        self._on_failure(FailureRecord.of_waiting(witness.ranks, pid, error))

    def _stop_all(self) -> None:
        self._shutdown.begin(self._job)
        self._check()

    def _kill_all(self) -> None:
        self._shutdown.kill()
        self._check()

    def _check(self) -> None:
        """Settle the job if it is over."""
        if self._settled.is_set():
            return
        if self._shutdown.has_begun:
            if all(member.has_left(self._job) for member in self._workers):
                self._settle()
        elif self._is_done():
            if not self._has_to_exit or self.all_ended():
                self._settle()
            else:
                self._stalls.expect_exit()

    def _is_done(self) -> bool:
        """Whether the work is done; how long a process may then take to leave, `TeardownTimeout` knows."""
        return self._job > 0 and all(member.jobs_done >= self._job for member in self._workers)

    def _settle(self) -> None:
        self._timers.clear()
        self._settled.set()

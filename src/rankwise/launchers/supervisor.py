"""The supervisor: one thread of the launching process that serves, watches and ends the ranks.

It waits, without polling, on the channels of all ranks and on the ends of the processes that it was given.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import final

from rankwise.errors import WorkerError, WorkerExitedError
from rankwise.failures.record import FailureCollector, FailureRecord
from rankwise.launchers.channel import REQUEST_ID_SIZE, FrameReader, Kind, frame, signal_in
from rankwise.monitoring.heartbeat import HeartbeatReader, MonitoredRank
from rankwise.monitoring.stacks import STACKS_SIGNAL, dump_stacks
from rankwise.monitoring.stragglers import JobTimeLimit, LocalStragglerMonitor, StopTimeout, TeardownTimeout
from rankwise.processes import fork_safety
from rankwise.processes.event_loop import READ, WRITE, EventLoop
from rankwise.processes.exit_codes import (
    LAST_LINES_TIMEOUT_S,
    exit_code_of,
    exit_now,
    is_hosted,
    write_stderr,
)
from rankwise.processes.signals import (
    INTERRUPT_NOTICE,
    ROUTER,
    SignalRequest,
    ended_by,
    raises_keyboard_interrupt,
    stopped_by,
)
from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo
from rankwise.stores.private import StoreTable
from rankwise.stores.tcp import RendezvousEndpoint

_CHUNK = 1 << 16
_SETTLE_S = 0.5  # how long to wait for another failure after one that looks like its consequence
_TO_LEAVE_S = 1.0  # at least, for rank 0 in the main process to leave the job when all others have ended
_SHORTEST_PAUSE_S = 0.1  # between two checks whether a checkpoint has been written


@final
@dataclass(frozen=True)
class SupervisionOptions:
    """How the local ranks of a job are started, watched and ended."""

    grace_period_s: float  # from STOP to SIGKILL
    init_timeout: timedelta  # for the ranks to meet
    stop_signals: Sequence[int] = (signal.SIGTERM,)  # stop ranks that train at a boundary; end others
    stall_warning_s: float = 60.0  # in one phase, for a rank that others wait for
    teardown_timeout_s: float | None = None  # also for a checkpoint that is written after STOP
    endpoint: RendezvousEndpoint | None = None  # where the nodes meet; None for a job on one node
    time_limit_s: float | None = None  # for a job


@final
@dataclass(eq=False)
class SupervisedRank(MonitoredRank):
    """A local rank, its channel, and how far it is."""

    sock: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: bytearray = field(default_factory=bytearray)
    has_failed: bool = False
    has_left_job: bool = False  # after a failure
    has_stopped: bool = False
    is_connected: bool = False  # whether its channel is read
    is_in_loop: bool = False
    jobs_done: int = 0
    exit_status: int | None = 0  # of one that has ended; None if it is unknown

    def has_data(self) -> bool:
        """Return whether the channel has unread bytes."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def has_left(self, job: int) -> bool:
        """Return whether the rank's process, or its job in the main process, has ended."""
        return self.has_ended or (self.process is None and (self.has_left_job or self.jobs_done >= job))

    def record(self, **facts: object) -> FailureRecord:
        """Return a record of this rank."""
        host = "" if self.process is None else self.process.host
        return FailureRecord.of_rank(self.ranks, self.pid, host=host or socket.gethostname(), **facts)

    def end(self, phase: str) -> FailureRecord:
        """Return the record of a rank whose process has ended in a phase of the job."""
        return self.record(exit_status=self.exit_status, phase=phase)


@final
@dataclass(eq=False)
class ShutdownSequence:
    """Ends the ranks of a supervisor: STOP, the grace period, SIGKILL; waits for unfinished checkpoints."""

    workers: Sequence[SupervisedRank]  # the supervisor's list, which grows
    failures: FailureCollector
    loop: EventLoop  # its deadline is used from `begin` on
    send: Callable[[SupervisedRank, Kind, bytes], None]
    options: SupervisionOptions
    is_main_stuck: Callable[[], bool]  # whether rank 0 in the main process has not noticed a Ctrl-C
    has_begun: bool = False  # a rank that ends afterwards has not failed
    ended_by: int | None = None  # the signal that ended the job at once
    _began_s: float = 0.0
    _job: int = 0
    _is_for_failure: bool = False
    _has_reported_saving: bool = False

    def begin(self, job: int) -> None:
        """Send STOP, once; kill after the grace period. Ranks not done with the job count as stopped."""
        if self.has_begun:
            return
        self.has_begun = True
        self._began_s, self._job, self._is_for_failure = time.monotonic(), max(1, job), bool(self.failures)
        for worker in self.workers:
            if not worker.has_failed and not worker.has_ended and worker.jobs_done < self._job:
                self.failures.stopped.append(worker.ranks.global_rank)
            self.send(worker, Kind.STOP, b"")
            if worker.process is not None and worker.process.is_suspended():
                worker.process.kill()  # it would not react
        self.loop.call_later(self.options.grace_period_s, self._end_grace)

    def kill(self) -> None:
        """Kill all that are left."""
        self.has_begun = True
        self._kill_but(())
        self.loop.call_later(max(_TO_LEAVE_S, self.options.grace_period_s), self._end_busy_main)

    def _end_grace(self) -> None:
        if not (saving := self._saving()):
            self.kill()
            return
        self._kill_but(saving)
        if not self._has_reported_saving:
            self._has_reported_saving = True
            ranks = ", ".join(str(worker.ranks.global_rank) for worker in saving)
            write_stderr(f"rankwise: the job ends when global_rank={ranks} has written its checkpoint.\n")
        self.loop.call_later(max(_SHORTEST_PAUSE_S, self.options.grace_period_s), self._end_grace)

    def _saving(self) -> list[SupervisedRank]:
        limit_s = self.options.teardown_timeout_s
        if limit_s is not None and time.monotonic() - self._began_s > limit_s:
            return []
        return [each for each in self.workers if not each.has_ended and each.heartbeat.is_saving()]

    def _kill_but(self, spared: Sequence[SupervisedRank]) -> None:
        for worker in self.workers:
            if worker.process is not None and not worker.has_ended and worker not in spared:
                worker.process.kill()

    def _end_busy_main(self) -> None:
        # Rank 0 in the main process may be in C code, in a block that catches all, or in another thread. The
        # others have been killed: the kernel may need time to end them. After a Ctrl-C that rank 0 has
        # noticed, the program decides.
        own = next((worker for worker in self.workers if worker.process is None), None)
        if own is None:
            return
        error, code = self.failures.error() if self._is_for_failure else None, None
        if not own.has_left(self._job):
            if self.ended_by is not None:
                code = 128 + self.ended_by
            elif error is not None and not is_hosted():
                code = exit_code_of(error)
            elif self.is_main_stuck() and not is_hosted():
                code = 128 + signal.SIGINT
        if error is not None:
            what = "raises this when it can" if code is None else "was still at work, so its process ends"
            write_stderr(f"rankwise: {error}\n  (rank 0 {what})\n", LAST_LINES_TIMEOUT_S)
        if code is not None:
            exit_now(code)


@final
class Supervisor:
    """Watch the local ranks of one group through one job or several.

    A job is `begin_job`, then `wait_job`. Only the supervisor's thread touches the state; the public methods
    use `call_soon`. It calls `on_failure` with each failure, for other nodes.
    """

    def __init__(
        self, options: SupervisionOptions, on_failure: Callable[[FailureRecord], None] | None = None
    ) -> None:
        self.was_interrupted = False  # whether Ctrl-C ended the job
        self._stop_signals = {*options.stop_signals, signal.SIGINT}
        self._ending_signals = {*options.stop_signals, signal.SIGTERM, signal.SIGHUP}
        self._workers: list[SupervisedRank] = []
        self._table = StoreTable()
        self._failures = FailureCollector(self._workers, on_failure)
        self._stalls = LocalStragglerMonitor(self._workers, warn_after_s=options.stall_warning_s)
        self._loop = EventLoop()
        self._shutdown = ShutdownSequence(
            self._workers, self._failures, self._loop, self._send, options, self._is_main_stuck
        )
        self._interrupts: list[int] = []  # an item for each Ctrl-C
        self._noticed: list[int] = []  # for each that the main thread has handled, in its loop
        self._stop_request = StopTimeout(self._workers, options.teardown_timeout_s, self._end_by)
        self._time_limit = JobTimeLimit(self._workers, options.time_limit_s, self._on_rank_timeout)
        self._stopped_by: int | None = None  # the signal for which training has stopped
        self._last_signal: int | None = None
        self._crash: BaseException | None = None
        self._is_closed = self._has_to_exit = False
        self._job = 0
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankwise-supervisor", daemon=True)

    def add(
        self, ranks: RankInfo, sock: socket.socket, process: StartedProcess | None, heartbeat: HeartbeatReader
    ) -> None:
        """Take charge of a local rank, before `start`; `process` is None for the launching process itself."""
        sock.setblocking(False)
        fork_safety.close_in_child(sock)
        self._workers.append(SupervisedRank(ranks, process, heartbeat, sock))

    def start(self) -> None:
        """Begin to watch."""
        self._loop.call_every(self._stalls.interval_s, self._stalls.look)
        self._loop.call_every(self._time_limit.interval_s, self._time_limit.look)
        if (timeout_s := self._shutdown.options.teardown_timeout_s) is not None:
            teardown = TeardownTimeout(self._workers, timeout_s, self._on_rank_timeout)
            self._loop.call_every(teardown.interval_s, teardown.look)
            self._loop.call_every(teardown.interval_s, self._stop_request.look)
        for worker in self._workers:
            self._loop.register(worker.sock, partial(self._on_channel, worker))
            worker.is_connected = True
            if worker.process is not None:
                self._loop.register(worker.process, partial(self._on_process_end, worker, worker.process))
        self._thread.start()

    def begin_job(self, until_exit: bool) -> None:
        """Begin the next job; with `until_exit` it is over when the processes have exited, not when done."""
        self._settled.clear()
        self._loop.call_soon(partial(self._begin, 1, until_exit))

    def begin_exit(self) -> None:
        """Expect the ranks to exit by themselves now; `wait_job` waits until they have."""
        self._settled.clear()
        self._loop.call_soon(partial(self._begin, 0, True))

    def _begin(self, jobs: int, until_exit: bool) -> None:
        self._settled.clear()
        self._has_to_exit = until_exit
        self._job += jobs
        self._time_limit.begin()
        for worker in self._workers:
            is_in_job = bool(jobs) and worker.jobs_done < self._job  # others may have done it already
            was_killed = worker.process is not None and worker.process.was_killed  # for an earlier failure
            if is_in_job and worker.has_ended and not (worker.has_failed or was_killed):
                self._on_early_end(worker, "before the next job began")
            elif worker.process is not None and not worker.is_connected:
                self._on_lost_channel(worker, worker.process)
        self._check()

    def wait_job(self) -> None:
        """Wait for the end of the job; raise its first failure, after which no started process is left.

        Raises:
            StoppedBySignal: when all ranks have stopped at a boundary.
            SystemExit, KeyboardInterrupt: when a signal ended the job at once.
        """
        self._settled.wait()
        if self._crash is not None:
            defect = RuntimeError("the supervisor of the job failed, which is a defect of rankwise")
            raise self.error() or defect from self._crash
        if self.ended_by is not None:
            raise SystemExit(128 + self.ended_by)
        if self.was_interrupted:  # and the function has caught what Python raised
            raise KeyboardInterrupt
        if error := self.error():
            try:
                raise error
            finally:
                del error  # or it lives in a cycle, through its traceback, until garbage is collected
        if self._stopped_by is not None:
            raise stopped_by(self._stopped_by)

    def release(self) -> None:
        """Send the ranks that the job is over for all of them."""
        for worker in self._workers:
            self._loop.call_soon(partial(self._send, worker, Kind.OVER, b""))

    @property
    def ended_by(self) -> int | None:
        """The signal that ended the job at once."""
        return self._shutdown.ended_by

    def end_all(self, by: int | None = None) -> None:
        """Send STOP, wait the grace period, then SIGKILL; wait for the ends. Ctrl-C kills at once.

        `by` is a signal that ended the program, for which `wait_job` in another thread raises `SystemExit`.
        """
        self._shutdown.ended_by = self.ended_by if by is None else by
        if self._crash is not None:
            return
        if not self._thread.is_alive():
            self.start()
        self._settled.clear()
        try:
            self._loop.call_soon(self._stop_all)
            self._settled.wait()
        except KeyboardInterrupt:
            self._loop.call_soon(self._kill_all)
            self._settled.wait()

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Act on Ctrl-C, SIGTERM and SIGHUP at once in the block; then raise the signal's exception, if any.

        A rank 0 in this process may be blocked in a collective until its peers have ended. It gets the
        `KeyboardInterrupt` of a Ctrl-C outside of its loop. Without such a rank, `wait_job` raises it.
        """
        self._last_signal = None
        has_rank_here = any(worker.process is None for worker in self._workers)
        replaces_interrupts = not has_rank_here and raises_keyboard_interrupt()
        with (
            ROUTER.subscribe(self._ending_signals, self._on_request),
            ROUTER.subscribe([STACKS_SIGNAL], self._on_stacks, is_debounced=False),
            ROUTER.subscribe(
                [signal.SIGINT],
                self._on_interrupt,
                is_debounced=False,
                sets_handler=replaces_interrupts,
                calls_earlier_handler=False,
            ),
            ROUTER.subscribe(
                [signal.SIGINT], self._on_noticed, in_main_thread=True, is_debounced=False, sets_handler=False
            ),
        ):
            yield
        if self._last_signal is not None:
            raise ended_by(self._last_signal) if has_rank_here else stopped_by(self._last_signal)

    def all_ended(self) -> bool:
        """Whether every started process is gone."""
        return all(worker.has_ended for worker in self._workers if worker.process is not None)

    def error(self) -> WorkerError | None:
        """Return the first failure as an exception, or None."""
        return self._failures.error()

    def ranks(self) -> list[FailureRecord]:
        """Return for each local rank a record that says which it is."""
        return [worker.record() for worker in self._workers]

    def close(self) -> None:
        """End the thread and close all descriptors; the processes must be gone."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            self._loop.stop()
            self._thread.join()
        for worker in self._workers:
            worker.sock.close()
            worker.heartbeat.close()
            if worker.process is not None:
                worker.process.close()
        self._loop.close()

    def _on_request(self, request: SignalRequest) -> None:
        self._last_signal = request.number
        if not request.is_repeat:
            self._loop.call_now(partial(self._on_stop_signal, request.number))

    def _on_interrupt(self, request: SignalRequest) -> None:
        if raises_keyboard_interrupt():
            self._last_signal = request.number
            self._interrupts.append(request.number)
            self._loop.call_now(partial(self._on_stop_signal, request.number))

    def _on_noticed(self, request: SignalRequest) -> None:
        self._noticed.append(request.number)

    def _is_main_stuck(self) -> bool:
        """Whether rank 0, in this process, has not handled a Ctrl-C, after which ranks were to stop."""
        has_asked = self._stop_request.number == signal.SIGINT
        return has_asked and len(self._noticed) < len(self._interrupts)

    def _on_stacks(self, request: SignalRequest) -> None:
        self._loop.call_now(partial(dump_stacks, self._workers, "SIGUSR2 was sent to the main process"))

    def _on_stop_signal(self, number: int) -> None:
        has_asked = self._stop_request.number is not None
        if number in self._stop_signals and not has_asked and self._ask_to_stop(number):
            self._stop_request.begin(number)
            if number == signal.SIGINT:
                write_stderr(INTERRUPT_NOTICE)
        else:
            self._end_by(number)

    def _end_by(self, number: int) -> None:
        if number == signal.SIGINT:
            self.was_interrupted = True
        else:
            self._shutdown.ended_by = number
        if self._shutdown.has_begun:
            self._kill_all()
        else:
            self._stop_all()

    def _ask_to_stop(self, number: int) -> bool:
        """Ask a rank that trains to stop with the others at a boundary; return whether there is one."""
        if self._shutdown.has_begun:
            return False  # all are told to end at once
        for worker in self._workers:
            if worker.is_in_loop and not worker.has_ended:
                self._send(worker, Kind.REQUEST, b"%d" % number)
                return True
        return False

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001  a job without a supervisor must not continue or wait
            self._crash = error
            self._shutdown.has_begun = True
            for worker in self._workers:
                if worker.process is not None and not worker.has_ended:
                    with suppress(OSError):
                        worker.process.kill()
                        worker.process.wait()
            self._settled.set()

    def _on_channel(self, worker: SupervisedRank, events: int) -> None:
        if events & WRITE:
            self._flush(worker, has_waited=True)
        if not events & ~WRITE:
            return
        try:
            data = worker.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            try:
                worker.reader.feed(data, partial(self._receive, worker))
            except Exception as error:  # noqa: BLE001  code of the rank has written to its channel
                self._disconnect(worker)
                self._on_broken_channel(worker, f"what it sent is no message: {error!r}")
        elif worker.is_connected:
            self._disconnect(worker)
            if worker.process is None:  # rank 0, in the main process, has given up
                worker.has_ended = True
                self._stop_all()
            else:
                self._on_lost_channel(worker, worker.process)

    def _disconnect(self, worker: SupervisedRank) -> None:
        self._loop.unregister(worker.sock)
        worker.is_connected = False

    def _on_lost_channel(self, worker: SupervisedRank, process: StartedProcess) -> None:
        """Fail if a rank that runs cannot report any more; one that ends is reported with its exit status."""
        is_in_job = worker.jobs_done < self._job
        if is_in_job and not self._may_end(worker) and process.has_memory():
            self._on_broken_channel(worker, process.lost_channel)

    def _may_end(self, worker: SupervisedRank) -> bool:
        """Whether the end of a rank during the job is not a failure of its own."""
        return worker.has_failed or worker.has_stopped or self._shutdown.has_begun

    def _on_broken_channel(self, worker: SupervisedRank, message: str) -> None:
        worker.has_failed = worker.has_left_job = True
        self._on_failure(worker.record(exception_type="BrokenChannel", exception_message=message))

    def _receive(self, worker: SupervisedRank, kind: Kind, payload: bytes) -> None:
        if kind is Kind.HELLO:
            worker.has_started = True
            worker.heartbeat.receive(payload)
        elif kind in (Kind.DONE, Kind.STOPPED):
            if kind is Kind.STOPPED:
                self._stopped_by = signal_in(payload)
                worker.has_stopped = True
            worker.jobs_done += 1
            self._check()
        elif kind is Kind.IN_LOOP:
            worker.is_in_loop = payload == b"1"
        elif kind in (Kind.FAILURE, Kind.ELSEWHERE):
            worker.has_failed |= kind is Kind.FAILURE
            self._on_failure(FailureRecord.from_json(payload))
        elif kind is Kind.LEFT:
            worker.has_left_job = True
            self._check()
        elif kind is Kind.EXITED:
            self._failures.exited.append(FailureRecord.from_json(payload))
        elif kind is Kind.STORE_REQUEST:
            request_id, request = payload[:REQUEST_ID_SIZE], payload[REQUEST_ID_SIZE:]
            send = partial(self._send, worker, Kind.STORE_REPLY, request_id)
            self._table.handle(request, send, (worker, request_id))
        elif kind is Kind.STORE_CANCEL:
            self._table.cancel((worker, payload))

    def _send(self, worker: SupervisedRank, kind: Kind, payload: bytes, more: bytes = b"") -> None:
        worker.outgoing += frame(kind, payload + more)
        self._flush(worker)

    def _flush(self, worker: SupervisedRank, *, has_waited: bool = False) -> None:
        """Write what the channel takes now, the rest when it is writable, so that no rank can block us."""
        if not worker.is_connected:
            return
        try:
            while worker.outgoing:
                del worker.outgoing[: worker.sock.send(worker.outgoing)]
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                worker.outgoing.clear()  # the rank is gone; the end of its process is reported
        if has_waited or worker.outgoing:
            self._loop.wait_writable(worker.sock, bool(worker.outgoing))

    def _on_process_end(self, worker: SupervisedRank, process: StartedProcess, events: int) -> None:
        self._loop.unregister(process)
        while worker.is_connected and worker.has_data():
            self._on_channel(worker, READ)
        worker.exit_status = process.wait()
        worker.has_ended = True
        is_in_job = worker.jobs_done < self._job
        phase = "before it had finished" if is_in_job else "after it had finished its part"
        if not worker.has_started:
            phase = WorkerExitedError.NOT_STARTED
        status = worker.exit_status or 0  # an unknown one is good where the rank has done its part
        if (status != 0 or is_in_job) and not self._may_end(worker):
            self._on_early_end(worker, phase)
        elif status < 0 and not (process.was_killed or worker.has_failed):
            self._failures.add_late(worker.end(phase))
        self._check()

    def _on_early_end(self, worker: SupervisedRank, phase: str) -> None:
        worker.has_failed = True
        self._on_failure(worker.end(phase))

    def _on_failure(self, record: FailureRecord) -> None:
        self._failures.add(record)
        if record.is_timeout and not self._shutdown.has_begun:
            dump_stacks(self._workers, "a rank waited too long")
        if self._shutdown.has_begun:
            self._check()
        elif record.is_consequence:
            if not self._loop.has_deadline:
                self._loop.call_later(_SETTLE_S, self._stop_all)
        else:
            self._stop_all()

    def _on_rank_timeout(self, witness: MonitoredRank, error: Exception) -> None:
        self._on_failure(FailureRecord.of_timeout(witness.ranks, witness.pid, error))

    def _stop_all(self) -> None:
        self._shutdown.begin(self._job)
        self._check()

    def _kill_all(self) -> None:
        self._shutdown.kill()
        self._check()

    def _check(self) -> None:
        """Settle the job if it is over. `TeardownTimeout` limits how long a process takes to exit then."""
        if self._settled.is_set():
            return
        if self._shutdown.has_begun:
            is_over = all(worker.has_left(self._job) for worker in self._workers)
        else:
            is_done = self._job > 0 and all(worker.jobs_done >= self._job for worker in self._workers)
            is_over = is_done and (not self._has_to_exit or self.all_ended())
            if is_done and not is_over:
                self._stalls.expect_exit()
        if is_over:
            self._loop.cancel_deadline()
            self._time_limit.end()
            self._settled.set()

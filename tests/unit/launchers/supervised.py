"""One end of a channel each: ranks without processes for a supervisor, and a supervisor for a rank."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest

from rankwise.errors import WorkerError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import REQUEST_ID_SIZE, FrameReader, Kind, RankChannel, frame
from rankwise.launchers.supervisor import SupervisionOptions, Supervisor
from rankwise.monitoring.heartbeat import HeartbeatReader
from rankwise.processes.memory_file import create_memory_file
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.started_process import LocalProcess
from rankwise.ranks import RankInfo
from rankwise.stores.private import pack_fields

LIMIT_S = 20.0  # nothing here takes so long, unless it hangs
NEVER_S = 1e6
SHORT_S = 0.005
GONE = 1 << 22  # no process has such an id
LOST_PEER = "Connection closed by peer"
STOP, OVER = (Kind.STOP, b""), (Kind.OVER, b"")
Error = TypeVar("Error", bound=WorkerError)


class ScriptedProcess(LocalProcess):
    """The stand-in for a process: a pipe in place of its pidfd, which is closed when the test ends it."""

    def __init__(self, pid: int, parent_pipe: ParentDeathPipe | None = None) -> None:
        self.pid = pid
        self.parent_pipe = parent_pipe
        self.was_killed = False
        self.is_reaped = False
        self.is_killable = True
        self.wait_error: Exception | None = None
        self._status: int | None = None
        self._end_descriptor, self._write_end = os.pipe()
        self._ending = threading.Lock()

    def end(self, status: int | None) -> None:
        """End the process, unless it has ended."""
        with self._ending:
            if self._write_end >= 0:
                self._status = status
                os.close(self._write_end)
                self._write_end = -1

    def wait(self) -> int | None:
        if self.wait_error is not None:
            raise self.wait_error
        self.is_reaped = True
        return self._reap()

    def _reap(self) -> int | None:
        return self._status

    def send_signal(self, number: int) -> None:
        if number == signal.SIGKILL and self.is_killable:
            self.end(-number)

    def close(self) -> None:
        self.end(None)
        os.close(self._end_descriptor)
        self._end_descriptor = -1
        if self.parent_pipe is not None:
            self.parent_pipe.close()


class ChannelEnd:
    """The end of a channel that the test reads and writes; the code under test has `theirs`."""

    def __init__(self) -> None:
        self.theirs, self.sock = socket.socketpair()
        self.sock.settimeout(LIMIT_S)
        self._received: list[tuple[Kind, bytes]] = []
        self._frames = FrameReader()

    def _read(self) -> None:
        self._frames.feed(self.sock.recv(1 << 16), lambda *each: self._received.append(each))

    def receive(self) -> tuple[Kind, bytes]:
        """Return the next frame."""
        while not self._received:
            self._read()
        return self._received.pop(0)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        self.sock.sendall(frame(kind, payload))


class Rank(ChannelEnd):
    """A rank as the test plays it: its end of the channel, its heartbeat, its process."""

    def __init__(self, ranks: RankInfo, process: ScriptedProcess | None) -> None:
        super().__init__()
        self.ranks = ranks
        self.heartbeat = create_memory_file()
        self.reader = HeartbeatReader(self.heartbeat)
        self._process = process

    @property
    def process(self) -> ScriptedProcess:
        """The process that stands for this rank, unless it runs in the launching process."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def add_to(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        supervisor.add(self.ranks, self.theirs, self._process, self.reader)

    def request(self, *fields: bytes, number: int = 1) -> None:
        """Send a request to the private store."""
        self.send(Kind.STORE_REQUEST, number.to_bytes(REQUEST_ID_SIZE, "big") + pack_fields(fields))

    def received(self) -> list[tuple[Kind, bytes]]:
        """Return the frames that the supervisor has sent after all that has happened so far."""
        wait_until_handled(self._supervisor)
        self.sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._read()
        self.sock.settimeout(LIMIT_S)
        received, self._received = self._received, []
        return received

    def record(self, kind: str = "ValueError", text: str = "", **facts: Any) -> FailureRecord:
        """Return the record of an exception of this rank."""
        facts = {"exception_type": kind, "exception_message": text, **facts}
        return FailureRecord.of_rank(self.ranks, self.pid, **facts)

    def fail(self, kind: str = "ValueError", text: str = "", **facts: Any) -> None:
        """Report an exception."""
        self.send(Kind.FAILURE, self.record(kind, text, **facts).to_json())

    def lose_peer(self) -> None:
        """Report the consequence of another rank's failure."""
        self.fail("RuntimeError", LOST_PEER, is_consequence=True)

    def exit(self, status: int | None = 0) -> None:
        """End the process: the kernel closes its files first."""
        self.sock.close()
        self.process.end(status)

    def close(self) -> None:
        self.sock.close()
        os.close(self.heartbeat)


def wait_until_handled(supervisor: Supervisor) -> None:
    """Wait until the supervisor has handled all that has happened so far.

    In the first pass its loop has perhaps begun before. Data and the end of a file take a pass each, and
    calls come before the events of their pass.
    """
    is_handled = threading.Event()
    call: Callable[[], None] = is_handled.set
    for _ in range(4):
        call = partial(supervisor._loop.call_soon, call)
    call()
    assert is_handled.wait(LIMIT_S)


class Ends(ChannelEnd):
    """A rank's channel and the supervisor's end of it."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs.settimeout(0)  # as the default that a program has set may be
        self.lost = threading.Event()
        self.channel = RankChannel(self.theirs, on_lost=self.lost.set)

    def close(self) -> None:
        self.channel.close()
        self.sock.close()


class Job:
    """A supervisor and its ranks."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        options: SupervisionOptions,
        on_failure: Callable[[FailureRecord], None] | None,
    ) -> None:
        self.reported: list[FailureRecord] = []
        self.supervisor = Supervisor(options, on_failure or self.reported.append)
        self._ranks = ranks
        for rank in ranks:
            rank.add_to(self.supervisor)

    def __getitem__(self, global_rank: int) -> Rank:
        return self._ranks[global_rank]

    def begin(self, *, until_exit: bool = True) -> "Job":
        """Start to watch, and begin the first job, which all ranks have started for; return this job."""
        self.send_all(Kind.HELLO)
        self.supervisor.start()
        self.supervisor.begin_job(until_exit)
        return self

    def send_all(self, kind: Kind, payload: bytes = b"") -> None:
        for rank in self._ranks:
            rank.send(kind, payload)

    def succeed(self) -> None:
        """Let all ranks be done, and wait for the end of a job that needs no exits."""
        self.send_all(Kind.DONE)
        self.supervisor.wait_job()

    def exit_all(self, status: int | None = 0) -> None:
        for rank in self._ranks:
            rank.exit(status)

    def was_killed(self) -> list[bool]:
        """Return for each rank whether the supervisor has killed its process."""
        return [rank.process.was_killed for rank in self._ranks]

    def is_over(self) -> bool:
        """Return whether `wait_job` would return, after all that has happened so far."""
        wait_until_handled(self.supervisor)
        return self.supervisor._settled.is_set()

    def failure(self) -> WorkerError:
        """Return the error that `wait_job` raises, which is of this kind."""
        return self.failure_of(WorkerError)

    def failure_of(self, kind: type[Error]) -> Error:
        """Return the error that `wait_job` raises, which is of this kind."""
        with pytest.raises(kind) as raised:
            self.supervisor.wait_job()
        return raised.value

    def close(self) -> None:
        self.supervisor.close()
        for rank in self._ranks:
            rank.close()


Supervise = Callable[..., Job]
OPTIONS = SupervisionOptions(grace_period_s=SHORT_S, init_timeout=timedelta(seconds=LIMIT_S))


def make_job(
    size: int = 2,
    *,
    here: bool = False,
    pid: int = GONE,
    on_failure: Callable[[FailureRecord], None] | None = None,
    **options: Any,
) -> Job:
    """Return a job of `size` ranks on one node; `here` is whether rank 0 is in this process.

    The system has no processes of the ranks, but where `pid` names one that stands for all.
    """
    processes = [None if here and number == 0 else ScriptedProcess(pid) for number in range(size)]
    ranks = [Rank(RankInfo(number, number, 0, size, size, 1), each) for number, each in enumerate(processes)]
    return Job(ranks, replace(OPTIONS, **options), on_failure)

"""What a worker does around its function: set up, report, wait for the others, exit."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rankwise.errors import RendezvousTimeoutError
from rankwise.launchers import script_place, worker_main
from rankwise.launchers.channel import Kind
from rankwise.launchers.context import WorkerContext, describe_context
from rankwise.launchers.worker_main import InheritedContext, JobSpec, attach, run_worker
from rankwise.processes.memory_file import owned_descriptor, pack, unpack
from rankwise.processes.signals import stopped_by
from rankwise.ranks import RankInfo
from tests.unit.launchers.supervised import SHORT_S, Ends

RANKS = RankInfo(1, 1, 0, 2, 2, 1)


def rank_of(worker: WorkerContext) -> int:
    return worker.ranks.global_rank


def fail(worker: WorkerContext) -> None:
    raise ValueError("loss is nan")


def stop(worker: WorkerContext) -> None:
    raise stopped_by(15)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the exit codes with which a worker would end this process."""
    codes: list[int] = []
    monkeypatch.setattr(worker_main, "exit_now", codes.append)
    return codes


def test_the_function_may_be_packed() -> None:
    """A started interpreter finds it in a memory file; a fork has it."""
    with ExitStack() as cleanup:
        packed = owned_descriptor(cleanup)
        pack(rank_of, packed.number)
        for entry in (rank_of, packed):
            assert JobSpec(entry, "spawn").run(WorkerContext(RANKS)) == 1


def test_a_job_that_succeeds(ends: Ends, exits: list[int]) -> None:
    """Its value is packed, then it is done; without a channel nobody is told."""
    values: list[object] = []
    for channel in (ends.channel, None):
        worker = WorkerContext(RANKS, channel=channel)
        run_worker(rank_of, worker, values.append, on_failure=lambda error: 7)
    assert values == [1, 1]
    assert (ends.receive(), exits) == ((Kind.DONE, b""), [])


def test_a_job_that_fails(ends: Ends, exits: list[int]) -> None:
    """The process exits with the code that `on_failure` returns for the exception."""
    errors: list[BaseException] = []

    def on_failure(error: BaseException) -> int:
        errors.append(error)
        return 7

    run_worker(fail, WorkerContext(RANKS, channel=ends.channel), print, on_failure)
    assert [type(error) for error in errors] == [ValueError]
    assert exits == [7]
    assert [ends.receive()[0] for _ in range(2)] == [Kind.FAILURE, Kind.LEFT]


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_job_that_is_stopped(ends: Ends, exits: list[int], is_supervised: bool) -> None:
    """The supervisor is told, and the process returns; under an agent it exits."""
    worker = WorkerContext(RANKS, channel=ends.channel if is_supervised else None)
    run_worker(stop, worker, lambda value: None, on_failure=lambda error: 143)
    assert exits == ([] if is_supervised else [143])
    if is_supervised:
        assert ends.receive() == (Kind.STOPPED, b"15")


@pytest.mark.parametrize("environ", [None, {"A": "launcher", "B": "launcher"}])
def test_the_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str] | None) -> None:
    """The launching process's where it is not inherited; the worker's own variables have precedence."""
    before, method = dict(os.environ), multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setenv("C", "server")
    try:
        JobSpec(rank_of, "spawn", environ).set_up_process({"A": "own"})
        found = {name: os.environ.get(name) for name in "ABC"}
        assert multiprocessing.get_start_method() == "spawn"
    finally:
        os.environ.clear()
        os.environ.update(before)
        multiprocessing.set_start_method(method, force=True)
    replaced = {"A": "own", "B": "launcher", "C": None}
    assert found == ({"A": None, "B": None, "C": "server"} if environ is None else replaced)


@pytest.fixture
def rerun(ends: Ends) -> Iterator[InheritedContext]:
    """Return the rank of a script that was run again; it has run a job."""
    with ExitStack() as cleanup:
        values = owned_descriptor(cleanup).number
        yield InheritedContext(RANKS, {"RANK": "1"}, None, ends.channel, values, jobs=1)


def release_when_done(ends: Ends) -> threading.Thread:
    """Send OVER after DONE, in a thread."""

    def release() -> None:
        assert ends.receive() == (Kind.DONE, b"")
        ends.send(Kind.OVER)

    thread = threading.Thread(target=release)
    thread.start()
    return thread


@pytest.mark.parametrize("is_picklable", [True, False])
def test_a_job_of_a_script(rerun: InheritedContext, ends: Ends, is_picklable: bool) -> None:
    """It is over when all are done; the main process gets the value where that can be pickled."""
    value = 5 if is_picklable else threading.Lock()
    thread = release_when_done(ends)
    with rerun.running(timeout_s=None) as run:
        run.value = value
    thread.join()
    assert (run.worker.job, run.values) == (2, {1: value})
    if is_picklable:
        assert unpack(rerun.values, copy=True) == 5
    else:
        assert os.fstat(rerun.values).st_size == 0


def test_a_job_of_a_script_that_does_not_succeed(rerun: InheritedContext, ends: Ends) -> None:
    """The main process raises the error; this one exits, after a stop as a shell shows the signal."""
    for error, code, kinds in (
        (ValueError(), 1, [Kind.FAILURE, Kind.LEFT]),
        (stopped_by(15), 143, [Kind.STOPPED]),
    ):
        with pytest.raises(SystemExit) as ended, rerun.running(timeout_s=None):
            raise error
        assert ended.value.code == code
        assert [ends.receive()[0] for _ in kinds] == kinds


def test_a_main_process_that_is_suspended_is_not_waited_for(
    rerun: InheritedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only it could end the wait; each time that it continues it has the whole time again."""
    looks: list[bool] = []

    def is_suspended(pid: int) -> bool:
        looks.append(len(looks) != 1)
        threading.Event().wait(0 if looks[-1] else 3 * SHORT_S)
        return looks[-1]

    monkeypatch.setattr(worker_main, "is_suspended", is_suspended)
    with pytest.raises(RendezvousTimeoutError, match="the main process, which is suspended"):
        worker_main._wait_until_over(rerun.channel, timeout_s=2 * SHORT_S)
    assert len(looks) >= 4


def test_a_main_process_may_take_its_time(rerun: InheritedContext, ends: Ends) -> None:
    """One that is not suspended has no limit."""
    timer = threading.Timer(4 * SHORT_S, ends.send, [Kind.OVER])
    timer.start()
    worker_main._wait_until_over(rerun.channel, timeout_s=SHORT_S)
    timer.join()


@pytest.mark.parametrize("what", ["is another file", "is closed"])
def test_a_program_that_a_worker_has_started(ends: Ends, what: str) -> None:
    """It has the variable, but its descriptor of that number is not the channel: nothing happens."""
    descriptor = os.dup(ends.sock.fileno())
    files = {"channel": descriptor, "heartbeat": 0, "values": 0}
    description = describe_context(WorkerContext(RANKS), files)
    os.close(descriptor)
    if what == "is another file":
        os.dup2(0, descriptor)
    attach(description)
    assert script_place.running is None
    if what == "is another file":
        os.close(descriptor)

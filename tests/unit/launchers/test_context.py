"""What a rank reports of its job, to the supervisor or to torchrun's agent, and the keys that ranks share."""

import json
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from rankwise.errors import ConfigurationError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.launchers.context import RankRun, WorkerContext, torchrun_variables
from rankwise.processes.signals import JobStopped, stopped_by
from rankwise.ranks import RankInfo
from tests.helpers.raising import raises
from tests.unit.launchers.supervised import LIMIT_S, LOST_PEER, Ends, Supervise

RANKS = RankInfo(3, 1, 1, 4, 2, 2)
TIMEOUT = timedelta(seconds=LIMIT_S)


def reported(ends: Ends) -> FailureRecord:
    """Return the failure that the rank reports next."""
    kind, payload = ends.receive()
    assert kind is Kind.FAILURE
    return FailureRecord.from_json(payload)


# -------------------------------------------------------------------------------------- how a job ends


def test_a_job_that_succeeds_reports_nothing(ends: Ends) -> None:
    """Its value is finished and returned; that it is done is for `finish` to say, a part of the job."""
    finished: list[object] = []
    assert WorkerContext(RANKS).run(lambda worker: worker.ranks.global_rank, finished.append) == 3
    assert finished == [3]
    worker = WorkerContext(RANKS, channel=ends.channel)
    assert worker.run(lambda worker: 5, finish=lambda value: ends.channel.send(Kind.DONE)) == 5
    assert ends.receive() == (Kind.DONE, b"")


def test_a_stop_has_a_value(ends: Ends) -> None:
    """It is finished too, and the supervisor gets the signal; no failure is reported."""
    stopped, finished = stopped_by(15), list[object]()
    stopped.value = "half"

    def entry(worker: WorkerContext) -> None:
        worker.report_failure(stopped)
        raise stopped

    raises(SystemExit, None, WorkerContext(RANKS, channel=ends.channel).run, entry, finished.append)
    assert finished == ["half"]
    assert ends.receive() == (Kind.STOPPED, b"15")


def test_a_failure_is_reported_then_its_end(ends: Ends) -> None:
    """Also one of `finish`; the rank is named by all its numbers."""

    def finish(value: object) -> None:
        raise ValueError(value)

    with pytest.raises(ValueError, match="loss is nan"):
        WorkerContext(RANKS, channel=ends.channel).run(lambda worker: "loss is nan", finish)
    record = reported(ends)
    assert (record.global_rank, record.local_rank, record.node_rank) == (3, 1, 1)
    assert (record.exception_type, record.exception_message) == ("ValueError", "loss is nan")
    assert ends.receive() == (Kind.LEFT, b"")


def test_stop_interrupts_the_job(ends: Ends) -> None:
    """After `on_stop`, in another thread; later on STOP calls nothing."""
    is_told = threading.Event()
    worker = WorkerContext(RANKS, channel=ends.channel, on_stop=is_told.set)

    def entry(worker: WorkerContext) -> None:
        ends.send(Kind.STOP)
        threading.Event().wait(LIMIT_S)

    raises(JobStopped, None, worker.run, entry, finish=lambda value: None)
    assert is_told.is_set()
    assert reported(ends).exception_type == "JobStopped"
    is_told.clear()
    ends.channel.call_on_stop(None)
    assert not is_told.is_set()


# -------------------------------------------------------------------------------------- reports


def test_a_failure_is_reported_once(ends: Ends) -> None:
    """Nothing has left before; a given record has precedence over one of the exception."""
    worker = WorkerContext(RANKS, channel=ends.channel)
    worker.leave()
    record = FailureRecord.of_rank(RANKS, 1, exception_type="Given")
    worker.report_failure(ValueError("first"), record, is_early=True)
    worker.report_failure(ValueError("second"))
    worker.leave()
    assert reported(ends) == replace(record, has_met=False)
    assert ends.receive() == (Kind.LEFT, b"")


@pytest.mark.parametrize("is_here", [True, False])
def test_a_failure_of_another_node_is_passed_on(ends: Ends, is_here: bool) -> None:
    """With a time of this node; the supervisor has seen those of its own."""
    ranks = RANKS if is_here else RankInfo(0, 0, 0, 4, 2, 2)
    record = FailureRecord.of_rank(ranks, 1, at_s=0.0, exception_type="ValueError")
    WorkerContext(RANKS, channel=ends.channel)._on_remote_failure(record.to_json())
    ends.channel.send(Kind.DONE)
    kind, payload = ends.receive()
    assert kind is (Kind.DONE if is_here else Kind.ELSEWHERE)
    if not is_here:
        received = FailureRecord.from_json(payload)
        assert received.at_s > 0
        assert received == replace(record, at_s=received.at_s)


def test_a_damaged_failure_of_another_node_is_one_here(ends: Ends) -> None:
    """The supervisor gets an error, the thread that reads goes on; without a supervisor nobody is told."""
    for channel in (ends.channel, None):
        WorkerContext(RANKS, channel=channel)._on_remote_failure(b"null")
    assert reported(ends).exception_type == "ProcessGroupError"


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which torchrun's agent looks for a rank's failure."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(time, "sleep", lambda seconds: path.with_name("slept").touch())
    return path


def message_in(path: Path) -> str:
    message: str = json.loads(path.read_text())["message"]["message"]
    return message


@pytest.mark.parametrize("is_early", [True, False])
def test_an_agent_finds_a_failure_in_its_file(error_file: Path, is_early: bool) -> None:
    """At once, and only the first; of an exit it sees the exit code itself."""
    WorkerContext(RANKS).report_failure(SystemExit(3), is_early=is_early)
    assert not error_file.exists()
    worker = WorkerContext(RANKS)
    worker.report_failure(ValueError("loss is nan"), is_early=is_early)
    worker.report_failure(ValueError("later"))
    assert message_in(error_file) == "ValueError: loss is nan"
    assert not error_file.with_name("slept").exists()


def test_a_consequence_is_written_late(error_file: Path) -> None:
    """Not before hooks of the user's, and then a second later, as agents compare whole seconds."""
    worker, error = WorkerContext(RANKS), RuntimeError(LOST_PEER)
    record = FailureRecord.of_exception(RANKS, error)
    assert record.is_consequence
    worker.report_failure(error, record, is_early=True)
    assert not error_file.exists()
    worker.report_failure(error, record)
    assert message_in(error_file) == f"RuntimeError: {LOST_PEER}"
    assert error_file.with_name("slept").exists()


# -------------------------------------------------------------------------------------- keys and variables


def test_ranks_of_a_node_share_a_key(supervise: Supervise) -> None:
    """The first makes one, which is random; the supervisor's store has it."""
    keys = []
    for job in (supervise(), supervise()):
        job.begin()
        for rank in (job[0], job[1]):
            channel = RankChannel(rank.sock.dup(), on_lost=lambda: None)
            worker = WorkerContext(rank.ranks, channel=channel)
            keys.append(worker.job_key(TIMEOUT))
            assert worker.job_key(TIMEOUT) == keys[-1]
            channel.close()
    assert len(keys[0]) == 64
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_keys_without_a_supervisor(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    """The launcher's key, or else the user's, who chooses one for several nodes; it must not be short."""
    monkeypatch.delenv("RANKWISE_JOB_KEY", raising=False)
    assert WorkerContext(RANKS, channel=ends.channel).job_key(TIMEOUT) == b""
    assert WorkerContext(RANKS, key=b"launcher's").job_key(TIMEOUT) == b"launcher's"
    monkeypatch.setenv("RANKWISE_JOB_KEY", "short")
    raises(ConfigurationError, None, WorkerContext(RANKS).job_key, TIMEOUT)


def test_torchruns_variables() -> None:
    """Where ranks meet in a store that listens, they find it as under torchrun; else only their numbers."""
    variables = torchrun_variables(RANKS, None)
    assert {name: value for name, value in variables.items() if not name.startswith("ROLE")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
    more = torchrun_variables(RANKS, ("127.0.0.1", 29500))
    assert (more["MASTER_ADDR"], more["MASTER_PORT"]) == ("127.0.0.1", "29500")
    assert more["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert variables.items() <= more.items()


def test_no_monitor_where_ranks_share_no_store() -> None:
    """Nor for one rank; which may still agree on stopping, with itself."""
    assert WorkerContext(RANKS).monitor_for_changes(TIMEOUT) is None
    alone = WorkerContext(RankInfo(), address=("127.0.0.1", 1))
    assert alone.monitor_for_changes(TIMEOUT) is None
    assert alone._monitor is None
    with alone.start_monitors([], TIMEOUT, TIMEOUT):
        assert alone.failure_exchange is None
    assert RankRun(alone).values == {}

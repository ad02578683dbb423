"""Failure records: what a rank tells of its end, which of several is the cause, and the error it becomes."""

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import (
    CollectiveMismatchError,
    RankZeroFailedError,
    RendezvousTimeoutError,
    StopAgreementError,
    WorkerExitedError,
    WorkerKilledError,
    WorkerRaisedError,
    WorkerTimedOutError,
)
from rankwise.failures.classify import is_of_user_code, mark_propagated
from rankwise.failures.record import FailureRecord, first_cause
from rankwise.processes.signals import JobStopped
from rankwise.ranks import RankInfo

RANKS = RankInfo(3, 1, 1, 4, 2, 2)


def record(rank: int = 0, at_s: float = 1.0, message: str = "", kind: str = "ValueError") -> FailureRecord:
    """Return a record of an exception whose type has this name."""
    error: Exception = type(kind, (Exception,), {})(message)
    made = FailureRecord.of_exception(RankInfo(rank, rank, 0, 4, 4, 1), error)
    return dataclasses.replace(made, pid=100 + rank, at_s=at_s, traceback_text="")


def exited(rank: int, at_s: float, status: int) -> FailureRecord:
    return FailureRecord(rank, rank, 0, 100 + rank, at_s, exit_status=status)


def of(error: BaseException) -> FailureRecord:
    """Raise an error and describe it."""
    try:
        raise error
    except BaseException as raised:
        return FailureRecord.of_exception(RANKS, raised)


def test_an_exception_is_described() -> None:
    """Rank, type, message and traceback, which do not change."""
    made = of(ValueError("a message"))
    assert (made.global_rank, made.local_rank, made.node_rank) == (3, 1, 1)
    assert (made.exception_type, made.exception_message) == ("ValueError", "a message")
    assert made.traceback_text.startswith("Traceback (most recent call last):\n")
    assert made.traceback_text.endswith("ValueError: a message\n")
    assert made.exit_status is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.at_s = 2.0  # type: ignore[misc]  # wrong on purpose
    error = FailureRecord.from_json(dataclasses.replace(made, host="gpu07").to_json()).to_error(0.0, (), ())
    assert (made.host, error.host) == (socket.gethostname(), "gpu07")


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), ("text", 1), (True, 1), (2.5, 1), (-1, 255)], ids=repr
)
def test_an_exit_is_described(code: object, status: int) -> None:
    """`SystemExit` has the status that Python would end with."""
    assert of(SystemExit(code)).exit_status == status


@pytest.mark.parametrize("text", ["plain", "caf\udce9", "\x00\n\ud800", "\u2028" * 3, "x" * 100_000])
def test_records_survive_the_channel(text: str) -> None:
    """Whatever the message holds comes back from JSON."""
    made = of(ValueError(text))
    assert FailureRecord.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34699",
        "Connection reset by peer",
        "Broken pipe",
        "store: wait of key had no answer in 5 s",
        "NCCL: remote process exited or there was a network error",
    ],
)
def test_echoes_are_told_apart(message: str) -> None:
    """What torch says of the end of a peer is a consequence; the same in the user's own errors is not."""
    assert record(message=message, kind="RuntimeError").is_consequence
    assert record(message=message, kind="DistStoreError").is_consequence
    assert not record(message=message, kind="ConnectionError").is_consequence
    assert not record(message="loss is nan").is_consequence
    assert record(kind="JobStopped").is_consequence
    assert not exited(0, 1.0, -9).is_consequence


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("RuntimeError", "[gloo/unbound_buffer.cc:81] Timed out waiting 600ms for recv operation", True),
        ("DistStoreError", "wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0", True),
        ("DistStoreError", "Timed out after 2 seconds waiting for clients. 1/2 clients joined.", True),
        ("DistStoreError", "store: wait of a, b had no answer in 1.5 s", True),
        ("RuntimeError", "DistStoreError: store: wait of a had no answer in 1.5 s\n\nAt:\n  ...", True),
        ("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms", True),
        ("DistBackendError", "WorkNCCL(SeqNum=7) ran for 600015 milliseconds before timing out.", True),
        ("RuntimeError", "the upload timed out after 30 s", False),
        ("RuntimeError", "timed out waiting for the upload", False),
        ("RuntimeError", "the feature store: no answer", False),
        ("TimeoutError", "Timed out waiting 600ms for recv operation", False),
    ],
)
def test_timeouts_of_collectives_are_told_apart(kind: str, message: str, expected: bool) -> None:
    """What waited for other ranks is one; a timeout of the user's own blames no rank."""
    assert record(kind=kind, message=message).is_timeout is expected


@pytest.mark.parametrize(
    "error",
    [
        RendezvousTimeoutError("the end of the job", 0.4),
        StopAgreementError((1,), 0.4),
        CollectiveMismatchError("all ranks", 3, {}, missing={"barrier": (1,)}, timeout_s=2.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_own_timeouts_are_known(error: Exception) -> None:
    """Each of our errors that says that others did not come is read as one."""
    assert of(error).is_timeout
    assert not of(error).is_consequence


def test_what_another_rank_has_raised_first_is_a_consequence() -> None:
    """Who raises rank zero's failure, or another rank's, is not taken for the cause."""
    assert of(RankZeroFailedError(0, "ValueError: x")).is_consequence
    assert of(mark_propagated(ValueError("propagated"))).is_consequence
    assert not of(ValueError("propagated")).is_consequence


def test_the_earliest_is_the_cause() -> None:
    """In whatever order failures are told; a consequence counts only where there is nothing else."""
    records = [record(0, 3.0), record(1, 1.0), exited(2, 2.0, 1)]
    assert first_cause(records).global_rank == 1
    echo = record(0, 1.0, "Connection closed by peer", "RuntimeError")
    assert first_cause([echo, record(1, 2.0)]).global_rank == 1
    assert first_cause([echo, exited(1, 2.0, -9)]).global_rank == 1
    assert first_cause([record(1, 2.0, "Broken pipe", "RuntimeError"), echo]).global_rank == 0


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (record(1, 2.5, "loss is nan."), WorkerRaisedError, "raised ValueError: loss is nan."),
        (exited(1, 2.5, 3), WorkerExitedError, "exited with code 3 before it had finished"),
        (exited(1, 2.5, 0), WorkerExitedError, "exited with code 0 before it had finished"),
        (exited(1, 2.5, -9), WorkerKilledError, "was killed by SIGKILL"),
        (exited(1, 2.5, -40), WorkerKilledError, "was killed by signal 40"),
    ],
)
def test_a_record_becomes_an_error(made: FailureRecord, kind: type[Exception], text: str) -> None:
    """Raised, left, or killed: each by its class, with the rank and what was seen of the others."""
    error = made.to_error(started_s=1.0, stopped=[0], others=[record(2, 3.0, "Broken pipe")])
    assert type(error) is kind
    assert (error.global_rank, error.pid, error.elapsed_s, error.stopped) == (1, 101, 1.5, (0,))
    assert text in str(error)
    assert "1.5 s after launch; then stopped: global_rank 0." in str(error)
    assert "consequence: global_rank 2 raised ValueError: Broken pipe" in str(error)


def test_a_line_is_one_line() -> None:
    """The short form of a record has no line break, and is not endless."""
    long = record(message="first\nsecond " + "x" * 10_000)
    assert long.line() == "global_rank 0 raised ValueError: first"
    assert len(record(message="x" * 10_000).line()) < 250
    assert exited(2, 1.0, -9).line() == "global_rank 2 was killed by SIGKILL"
    assert exited(2, 1.0, 3).line() == "global_rank 2 exited with code 3"


def test_the_same_traceback_is_told_once() -> None:
    """Ranks that fail alike are listed; what differs is a consequence of its own."""
    facts = {"local_rank": 0, "node_rank": 0, "pid": 1, "exception_type": "ValueError"}
    records = [
        FailureRecord(global_rank=rank, at_s=rank, traceback_text=text, **facts)  # type: ignore[arg-type]  # a mix of types
        for rank, text in enumerate(["same", "other", "same", "same"])
    ]
    error = records[0].to_error(0.0, (), records[1:])
    assert error.alike == (2, 3)
    assert [line.partition(" raised")[0] for line in error.consequences] == ["global_rank 1"]
    assert "the same on global_rank 2, 3" in str(error)


GONE = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34699")
LATE = RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 600ms for recv operation to complete")


def raised_from(error: BaseException, found: BaseException) -> BaseException:
    """Return an error that user code raises from what it has caught."""
    error.__cause__ = found
    return error


def raised_while(error: BaseException, found: BaseException) -> BaseException:
    """Return an error that comes up while another is handled, as in a `finally` block."""
    try:
        try:
            raise found
        finally:
            raise error
    except BaseException as both:
        return both


@pytest.mark.parametrize("around", [raised_from, raised_while])
@pytest.mark.parametrize(
    "found",
    [GONE, RankZeroFailedError(0, "ValueError: x"), mark_propagated(ValueError("propagated")), JobStopped()],
    ids=["gloo", "rank zero", "propagated", "stopped"],
)
def test_what_wraps_a_consequence_is_one(
    around: Callable[[BaseException, BaseException], BaseException], found: BaseException
) -> None:
    """Whatever user code makes of the end of another rank, it is not the cause; its words are told."""
    made = of(around(ValueError("step failed"), KeyError("in between")))
    assert not made.is_consequence
    outer = around(ValueError("step failed"), around(KeyError("in between"), found))
    made = of(outer)
    assert (made.is_consequence, made.is_timeout, is_of_user_code(outer)) == (True, False, True)
    killed = exited(1, made.at_s + 1, -9)
    assert first_cause([made, killed]) is killed
    error = killed.to_error(0.0, (), [made])
    assert error.consequences == ("global_rank 3 raised ValueError: step failed",)


def test_leaving_for_a_consequence_is_one() -> None:
    """`sys.exit()` in answer to another rank's end."""
    made = of(raised_while(SystemExit(3), GONE))
    assert made.is_consequence
    assert first_cause([made, exited(1, made.at_s + 1, -9)]).exit_status == -9
    assert not of(SystemExit(3)).is_consequence


def test_what_wraps_a_consequence_is_the_cause_where_there_is_no_other() -> None:
    """The user's own mistake in a `finally` block is told with its traceback; his own peer is no rank."""
    made = of(raised_while(FileNotFoundError("no such file"), GONE))
    error = first_cause([made]).to_error(0.0, (), ())
    assert isinstance(error, WorkerRaisedError)
    assert (error.exception_type, error.exception_message) == ("FileNotFoundError", "no such file")
    assert "raise error" in error.traceback_text
    assert "Connection closed by peer" in error.traceback_text
    assert error.has_lost_peer
    error = first_cause([of(ConnectionError("Connection reset by peer"))]).to_error(0.0, (), ())
    assert isinstance(error, WorkerRaisedError)
    assert not error.has_lost_peer


def test_what_wraps_a_timeout_is_one() -> None:
    """The ranks that did not come are named, in the user's own words, and with the traceback."""
    outer = raised_from(ValueError("step failed"), LATE)
    made = of(outer)
    assert (made.is_timeout, made.is_consequence, is_of_user_code(outer)) == (True, False, True)
    error = dataclasses.replace(made, missing=(1,)).to_error(0.0, (), ())
    assert isinstance(error, WorkerTimedOutError)
    assert "waited too long for global_rank=1: raised ValueError: step failed." in str(error)
    assert "Timed out waiting 600ms" in error.traceback_text
    error = dataclasses.replace(made, missing=(1, RANKS.global_rank)).to_error(0.0, (), ())
    assert isinstance(error, WorkerTimedOutError)
    assert error.missing == (1,)  # a rank does not miss itself


@pytest.mark.parametrize("found", [GONE, LATE], ids=["gone", "late"])
def test_what_is_none_of_the_error_does_not_count(found: RuntimeError) -> None:
    """`from None` and an error of this package stand for themselves; a chain may be a circle."""
    hidden = raised_while(ValueError("hidden"), found)
    hidden.__suppress_context__ = True
    mismatch = raised_from(CollectiveMismatchError("all ranks", 3, {}), found)
    circle = ValueError("a circle")
    circle.__cause__ = raised_from(KeyError("back"), circle)
    for error in (hidden, mismatch, circle):
        made = of(error)
        assert not made.is_consequence
        assert not made.is_timeout


def run_code(text: str, filename: str, **names: Any) -> BaseException:
    """Return what a piece of code raises."""
    try:
        exec(compile(text, filename, "exec"), names)
    except Exception as error:
        return error
    raise ValueError("the code raised nothing")


@pytest.mark.usefixtures("removed_directory")
@pytest.mark.parametrize("filename", ["<string>", "<frozen os>"])
def test_a_working_directory_that_is_gone(filename: str) -> None:
    """A rank's exception is described although relative names lead nowhere any more."""
    with pytest.raises(FileNotFoundError):
        Path.cwd()
    made = of(run_code("raise ValueError('on purpose')", filename))
    assert made.exception_message == "on purpose"
    assert "line 1, in <module>" in made.traceback_text


class NoSource:
    """A loader that fails when it is asked for a module's source."""

    def get_source(self, name: str) -> str:
        raise LookupError(name)


def test_a_traceback_that_cannot_be_had() -> None:
    """Type, text and places are told, whatever goes wrong while the lines of source are looked for."""
    error = run_code("raise ValueError('on purpose')", "odd.py", __name__="odd", __loader__=NoSource())
    made = of(error)
    assert (made.exception_type, made.exception_message) == ("ValueError", "on purpose")
    assert 'File "odd.py", line 1, in <module>\nValueError: on purpose\n' in made.traceback_text


def test_an_error_whose_text_or_attributes_fail() -> None:
    """An exception that raises when it is read is described all the same."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Delegating(Exception):
        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    assert of(Delegating("text")).exception_message == "text"
    made = of(Wordless())
    assert (made.exception_type, type(made.exception_message)) == ("Wordless", str)

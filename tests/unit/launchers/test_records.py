"""Failure records: what a rank tells of its end, which of several is the cause, and the error it becomes."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from rankwise.errors import (
    CollectiveMismatchError,
    RankZeroFailedError,
    RendezvousTimeoutError,
    StopAgreementError,
    WorkerExitedError,
    WorkerKilledError,
    WorkerRaisedError,
)
from rankwise.launchers._records import FailureRecord, first_cause
from rankwise.process_group.echoes import echo_of
from rankwise.ranks import RankInfo

RANKS = RankInfo(3, 1, 1, 4, 2, 2)


def record(rank: int = 0, at_s: float = 1.0, message: str = "", kind: str = "ValueError") -> FailureRecord:
    return FailureRecord(rank, rank, 0, 100 + rank, at_s, exception_type=kind, exception_message=message)


def exited(rank: int, at_s: float, status: int) -> FailureRecord:
    return FailureRecord(rank, rank, 0, 100 + rank, at_s, exit_status=status)


def of(error: BaseException) -> FailureRecord:
    """Raise an error and describe it."""
    try:
        raise error
    except BaseException as raised:
        return FailureRecord.of_exception(RANKS, raised)


def test_an_exception_is_described() -> None:
    """Rank, type, message and traceback."""
    made = of(ValueError("a message"))
    assert (made.global_rank, made.local_rank, made.node_rank) == (3, 1, 1)
    assert (made.exception_type, made.exception_message) == ("ValueError", "a message")
    assert made.traceback_text.startswith("Traceback (most recent call last):\n")
    assert made.traceback_text.endswith("ValueError: a message\n")
    assert made.exit_status is None
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


def test_a_rank_zero_that_failed_is_an_echo() -> None:
    """Who waits for rank zero raises its failure, not one of its own."""
    assert of(RankZeroFailedError(0, "ValueError: x")).is_consequence


def test_the_earliest_is_the_cause() -> None:
    """The first of several failures, in whatever order they are told."""
    records = [record(0, 3.0), record(1, 1.0), exited(2, 2.0, 1)]
    assert first_cause(records).global_rank == 1


def test_an_echo_is_no_cause() -> None:
    """A consequence is passed over although it came first; among consequences the first counts."""
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
    assert exited(2, 1.0, -9).line() == "global_rank 2 ended with status -9"


def test_an_error_without_words() -> None:
    """An exception whose `__str__` fails is described all the same."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    made = of(Wordless())
    assert made.exception_type == "Wordless"
    assert isinstance(made.exception_message, str)


def test_records_do_not_change() -> None:
    """A record is a fact."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().at_s = 2.0  # type: ignore[misc]  # wrong on purpose


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


def test_what_another_rank_has_raised_first_is_a_consequence() -> None:
    """An exception that a rank raises on another's word is not taken for the cause."""
    assert of(echo_of(ValueError("told"))).is_consequence
    assert not of(ValueError("told")).is_consequence

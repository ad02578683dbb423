"""The failures of a job: which ranks a timeout names, and records of the same failure."""

import dataclasses
import time
from typing import TypeVar

import pytest

from rankwise.errors import WorkerError, WorkerKilledError, WorkerRaisedError, WorkerTimedOutError
from rankwise.failures.record import FailureCollector, FailureRecord
from rankwise.monitoring.heartbeat import (
    TEARDOWN,
    Heartbeat,
    MonitoredRank,
    heartbeat_written_to,
    report_phase,
)

GAVE_UP = "Timed out waiting 3000ms for recv operation to complete"
Error = TypeVar("Error", bound=WorkerError)


def error_of(failures: FailureCollector, kind: type[Error]) -> Error:
    """Return the error of the job, which is of this kind."""
    error = failures.error()
    assert isinstance(error, kind)
    return error


def timed_out(
    rank: int, at_s: float, heartbeat: Heartbeat | None = None, text: str = GAVE_UP
) -> FailureRecord:
    record = FailureRecord(rank, rank, 0, 1, at_s, exception_type="RuntimeError", heartbeat=heartbeat)
    is_timeout = text == GAVE_UP
    return dataclasses.replace(
        record, exception_message=text, is_timeout=is_timeout, is_consequence=not is_timeout
    )


@pytest.mark.parametrize(
    ("waits", "came_late", "missing"),
    [(False, False, (1, 3)), (True, False, (3,)), (True, True, (1, 3))],
    ids=["elsewhere", "waits too", "came when the other had given up"],
)
def test_who_is_missing(
    workers: list[MonitoredRank],
    heartbeats: list[int],
    waits: bool,
    came_late: bool,
    missing: tuple[int, ...],
) -> None:
    """A rank is missing unless it had come before the other timed out, however late that is read."""
    failures = FailureCollector(workers)
    with heartbeat_written_to(heartbeats[1]):
        gave_up_s = time.monotonic()
        report_phase("backward", step=3, waits=waits)
        record = timed_out(0, gave_up_s if came_late else time.monotonic())
        failures.add(dataclasses.replace(record, missing=(3,)))  # on another node
    error = error_of(failures, WorkerTimedOutError)
    assert error.missing == missing
    assert "step 3, backward" in error.last_seen[0]


@pytest.mark.parametrize(
    ("heartbeat", "text", "after_s", "missing"),
    [
        (Heartbeat(-1, 7.0, True, "all_reduce"), GAVE_UP, 0.1, (3,)),
        (Heartbeat(-1, 6.0, False, "running"), GAVE_UP, 0.1, (3,)),
        (Heartbeat(-1, 7.0, True, "all_reduce"), "Connection closed by peer", 0.5, (3,)),
        (Heartbeat(-1, 6.0, False, "running"), "Connection closed by peer", 0.1, (3,)),
        (Heartbeat(-1, 6.0, False, "running"), "Connection closed by peer", 0.5, (1, 3)),
        (Heartbeat(-1, 10.2, True, "all_reduce"), GAVE_UP, 3.2, (1, 3)),
    ],
    ids=["waited", "in torch's own", "felt the other", "felt it in torch's own", "too late", "waited later"],
)
def test_who_has_given_up_just_as_well(
    workers: list[MonitoredRank],
    heartbeats: list[int],
    heartbeat: Heartbeat,
    text: str,
    after_s: float,
    missing: tuple[int, ...],
) -> None:
    """A rank that waited for the same rank is not missing; its status is that of the wait."""
    failures = FailureCollector(workers)
    with heartbeat_written_to(heartbeats[1]):
        report_phase(TEARDOWN)
        failures.add(dataclasses.replace(timed_out(0, 10.0), missing=(3,)))  # on another node
    failures.add(timed_out(1, 10.0 + after_s, heartbeat, text))
    error = error_of(failures, WorkerTimedOutError)
    assert (error.global_rank, error.missing) == (0, missing)
    assert error.last_seen == (
        f"global_rank=1 was last in {heartbeat.phase}, {max(0, 10 - heartbeat.at_s):.0f} s ago",
    )


def test_who_waits_for_one_another(workers: list[MonitoredRank]) -> None:
    """Two ranks in two collectives: neither has come to the other's, so the error names the other one."""
    failures = FailureCollector(workers)
    failures.add(timed_out(0, 10.0))
    failures.add(timed_out(1, 10.1))
    error = error_of(failures, WorkerTimedOutError)
    assert (error.global_rank, error.missing) == (0, (1,))


def test_who_hangs_in_its_wait_is_missing(workers: list[MonitoredRank], heartbeats: list[int]) -> None:
    """Of three ranks that all wait, the one that does not time out hangs: it alone is missing."""
    failures = FailureCollector(workers)
    with heartbeat_written_to(heartbeats[1]):
        report_phase("all_reduce", waits=True)
        failures.add(timed_out(0, time.monotonic()))
    failures.add(timed_out(2, time.monotonic()))
    error = error_of(failures, WorkerTimedOutError)
    assert (error.global_rank, error.missing) == (0, (1,))


def test_the_rank_that_reports_is_not_missing(workers: list[MonitoredRank]) -> None:
    """A rank that timed out first and reports last is neither missing nor stopped."""
    failures = FailureCollector(workers)
    failures.add(timed_out(1, 10.1))
    failures.stopped += [0]
    failures.add(dataclasses.replace(timed_out(0, 10.0), missing=(1, 3)))
    error = error_of(failures, WorkerTimedOutError)
    assert (error.global_rank, error.missing, error.stopped) == (0, (3,), ())


def test_a_failure_that_several_ranks_have_heard_of(workers: list[MonitoredRank]) -> None:
    """A failure of another node that two ranks report is one failure, and is passed on once."""
    seen: list[FailureRecord] = []
    failures = FailureCollector(workers, seen.append)
    record = FailureRecord(3, 1, 1, 100, at_s=1.0, exception_type="ValueError", traceback_text="there")
    for at_s in (1.0, 1.5):
        failures.add(dataclasses.replace(record, at_s=at_s))
    error = error_of(failures, WorkerRaisedError)
    assert (error.global_rank, error.alike, seen) == (3, (), [record])


def killed(rank: int, at_s: float) -> FailureRecord:
    return FailureRecord(rank, 0, 0, 100 + rank, at_s, exit_status=-9)


def test_another_that_was_killed_has_its_line(workers: list[MonitoredRank]) -> None:
    """Before the ranks are stopped, on another node, or after; the first one is the cause."""
    failures = FailureCollector(workers)
    failures.add(killed(1, 2.0))
    failures.add(killed(3, 2.5))
    failures.stopped.extend((0, 2))
    failures.add_late(killed(2, 1.9))
    error = error_of(failures, WorkerKilledError)
    assert (error.global_rank, error.stopped) == (1, (0,))
    assert error.consequences == tuple(f"global_rank {rank} was killed by SIGKILL" for rank in (3, 2))


def test_a_rank_whose_end_is_seen_late_is_the_cause(workers: list[MonitoredRank]) -> None:
    """Where the others report lost connections only, and are stopped before its process has ended."""
    lost = timed_out(0, 1.0, text="Connection reset by peer")
    failures = FailureCollector(workers)
    failures.add(lost)
    failures.stopped.append(1)
    failures.add_late(killed(1, 2.0))
    error = error_of(failures, WorkerKilledError)
    assert (error.global_rank, error.stopped) == (1, ())
    assert error.consequences == (lost.line(),)


def test_what_ends_without_a_failure_is_none(workers: list[MonitoredRank]) -> None:
    """A rank that a signal has ended while the job was stopping is no failure."""
    failures = FailureCollector(workers)
    failures.add_late(killed(1, 2.0))
    assert failures.error() is None

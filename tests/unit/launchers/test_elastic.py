"""What an elastic job's log says of a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rankwise.failures.record import FailureRecord
from rankwise.launchers.elastic import _agent_signals, _Job
from rankwise.launchers.worker_main import JobSpec
from rankwise.processes.shared_memory import owned_descriptor
from rankwise.stores.restart import RestartInfo

THERE = FailureRecord(1, 1, 0, 101, at_s=1.0, exit_status=0)
RAISED = FailureRecord(0, 0, 0, 100, at_s=3.0, exception_type="ValueError", exception_message="not yet")
ECHO = FailureRecord(
    0,
    0,
    0,
    100,
    at_s=2.0,
    exception_type="RuntimeError",
    exception_message="Connection closed by peer",
    is_consequence=True,
)


@pytest.fixture
def job() -> Iterator[_Job]:
    """Return a job of two ranks on one node."""
    with ExitStack() as cleanup:
        yield _Job(
            JobSpec(entry=print, start_method="fork"),
            values=[],
            failures=[owned_descriptor(cleanup) for _ in range(2)],
            parent_pipe=owned_descriptor(cleanup),
            is_alone=True,
            key=b"",
        )


@pytest.mark.parametrize(
    ("left", "exits", "why"),
    [
        ([RAISED], [(100, 1)], "global_rank 0 raised ValueError: not yet"),
        ([ECHO, THERE], [(101, -9)], "global_rank 1 was killed by SIGKILL"),
        ([THERE], [(101, 3)], "global_rank 1 exited with code 3"),
        (
            [ECHO, THERE],
            [],
            "a rank ended without an exception; global_rank 0 raised RuntimeError: Connection closed by peer",
        ),
        ([THERE], [(999, -9)], "a rank ended without an exception"),
    ],
    ids=["raised", "killed", "left", "not reported", "of another start"],
)
def test_why_all_start_again(
    job: _Job,
    caplog: pytest.LogCaptureFixture,
    left: list[FailureRecord],
    exits: list[tuple[int, int]],
    why: str,
) -> None:
    """The rank that ended first is named, also without a report; not one that failed as a consequence."""
    for record in left:
        os.pwrite(job.failures[record.local_rank].number, record.to_json(), 0)
    for pid, status in exits:
        job.note_exit(pid, status)
    job.begin(RestartInfo(1, "a job"))
    assert caplog.messages == [f"All ranks start again (restart 1): {why}"]
    assert job.unreported == []


def test_a_signal_that_was_ignored_is_ignored_again() -> None:
    """Under nohup: older versions of torch set handlers of SIGHUP and others, and leave them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _agent_signals():
            signal.signal(signal.SIGHUP, lambda number, frame: None)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_record_that_is_cut_off_is_left_out(job: _Job) -> None:
    """A rank may be killed while it writes: what the others have written counts."""
    for file, record, end in zip(job.failures, (RAISED, ECHO), (None, -20), strict=True):
        os.pwrite(file.number, record.to_json()[:end], 0)
    assert job.records() == [RAISED]

"""A rank that hangs in its teardown is found; one that still works is left alone."""

from __future__ import annotations

import os
import time

import pytest

from rankwise.failures.record import FailureRecord
from rankwise.launchers import teardown_timeout
from rankwise.launchers.teardown_timeout import TeardownTimeout
from rankwise.launchers.worker_state import WorkerState
from rankwise.monitoring.heartbeat import (
    LEAVING,
    TEARDOWN,
    HeartbeatReader,
    heartbeat_written_to,
    report_phase,
)
from rankwise.processes.shared_memory import create_memory_file

TIMEOUT_S = 0.4
LONG_S = 30.0


def watched(workers: list[WorkerState], phase: str, seconds: float) -> list[FailureRecord]:
    """Let rank 1 be in a phase for so long, or until it is reported; return what the watch reports."""
    found: list[FailureRecord] = []
    watch = TeardownTimeout(workers, TIMEOUT_S, found.append)
    descriptor = create_memory_file()
    workers[1].heartbeat = HeartbeatReader(descriptor)
    with heartbeat_written_to(descriptor):
        report_phase(phase)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not found:
            time.sleep(watch.time_left() or 0)
            watch.look()
        watch.look()
    os.close(descriptor)
    return found


def test_a_teardown_that_hangs(workers: list[WorkerState]) -> None:
    """It is reported once, as a wait of the other rank that has timed out."""
    [record] = watched(workers, TEARDOWN, LONG_S)
    assert (record.global_rank, record.is_timeout) == (0, True)
    assert "Waited 0.4 s for the end of the job" in record.exception_message


def test_work_may_take_its_time(workers: list[WorkerState]) -> None:
    """What a rank does before its teardown has no end."""
    assert watched(workers, "running", 2 * TIMEOUT_S) == []


def test_a_watch_that_was_suspended(workers: list[WorkerState]) -> None:
    """Who looks late has perhaps been suspended together with the ranks: they get another moment."""
    found: list[FailureRecord] = []
    watch = TeardownTimeout(workers, TIMEOUT_S, found.append)
    watch.look()
    descriptor = create_memory_file()
    workers[1].heartbeat = HeartbeatReader(descriptor)
    with heartbeat_written_to(descriptor):
        report_phase(TEARDOWN)
        time.sleep(2 * TIMEOUT_S)
        watch.look()
    os.close(descriptor)
    assert found == []


def test_the_way_out_may_take_longer(workers: list[WorkerState], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter needs time to leave, however short a collective may take; but it has an end too."""
    assert watched(workers, LEAVING, 2 * TIMEOUT_S) == []
    monkeypatch.setattr(teardown_timeout, "LEAST_TO_LEAVE_S", TIMEOUT_S)
    assert [record.global_rank for record in watched(workers, LEAVING, LONG_S)] == [0]

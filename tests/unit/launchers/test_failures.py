"""The failures of a job: which ranks a timeout names, and what is told twice."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from rankwise.errors import WorkerRaisedError, WorkerTimedOutError
from rankwise.launchers._failures import Failures
from rankwise.launchers._member import Member
from rankwise.launchers._memory_file import create_memory_file
from rankwise.launchers._records import FailureRecord
from rankwise.process_group.pulse import PulseReader, beat, pulse_written_to


@pytest.mark.parametrize(
    ("waits", "came_late", "missing"),
    [(False, False, (1,)), (True, False, ()), (True, True, (1,))],
    ids=["elsewhere", "waits too", "came when the other had given up"],
)
def test_who_is_missing(
    members: list[Member], waits: bool, came_late: bool, missing: tuple[int, ...]
) -> None:
    """A rank is, unless it had come before the other gave up; however late that is read."""
    descriptor = create_memory_file()
    members[1].pulse = PulseReader(descriptor)
    failures = Failures(members)
    with pulse_written_to(descriptor):
        gave_up_s = time.monotonic()
        beat("backward", step=3, waits=waits)
        failures.add(
            FailureRecord(
                global_rank=0,
                local_rank=0,
                node_rank=0,
                pid=os.getpid(),
                at_s=gave_up_s if came_late else time.monotonic(),
                exception_type="RuntimeError",
                exception_message="Timed out waiting 6000ms for recv operation to complete",
            )
        )
    os.close(descriptor)
    error = failures.error()
    assert isinstance(error, WorkerTimedOutError)
    assert error.missing == missing
    assert "step 3, backward" in error.last_seen[0]


def test_a_failure_that_several_ranks_have_heard_of(members: list[Member]) -> None:
    """What comes from another node by way of two ranks is one failure, and told on once."""
    told: list[FailureRecord] = []
    failures = Failures(members, told.append)
    record = FailureRecord(3, 1, 1, 100, at_s=1.0, exception_type="ValueError", traceback_text="there")
    for at_s in (1.0, 1.5):
        failures.add(dataclasses.replace(record, at_s=at_s))
    error = failures.error()
    assert isinstance(error, WorkerRaisedError)
    assert (error.global_rank, error.alike, told) == (3, (), [record])

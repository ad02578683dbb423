"""A rank that hangs in its teardown is found; one that still works is left alone."""

from __future__ import annotations

import os
import time

import pytest

from rankwise.launchers import _ends
from rankwise.launchers._ends import EndWatch
from rankwise.launchers._member import Member
from rankwise.launchers._memory_file import create_memory_file
from rankwise.launchers._records import FailureRecord
from rankwise.process_group.pulse import LEAVING, TEARDOWN, PulseReader, beat, pulse_written_to

TIMEOUT_S = 0.4
LONG_S = 30.0


def watched(members: list[Member], phase: str, seconds: float) -> list[FailureRecord]:
    """Let rank 1 be in a phase for so long, or until it is reported; return what the watch reports."""
    found: list[FailureRecord] = []
    watch = EndWatch(members, TIMEOUT_S, found.append)
    descriptor = create_memory_file()
    members[1].pulse = PulseReader(descriptor)
    with pulse_written_to(descriptor):
        beat(phase)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not found:
            time.sleep(watch.time_left() or 0)
            watch.look()
        watch.look()
    os.close(descriptor)
    return found


def test_a_teardown_that_hangs(members: list[Member]) -> None:
    """It is reported once, as a wait of the other rank that has timed out."""
    [record] = watched(members, TEARDOWN, LONG_S)
    assert (record.global_rank, record.is_timeout) == (0, True)
    assert "Waited 0.4 s for the end of the job" in record.exception_message


def test_work_may_take_its_time(members: list[Member]) -> None:
    """What a rank does before its teardown has no end."""
    assert watched(members, "running", 2 * TIMEOUT_S) == []


def test_a_watch_that_was_suspended(members: list[Member]) -> None:
    """Who looks late has perhaps been suspended together with the ranks: they get another moment."""
    found: list[FailureRecord] = []
    watch = EndWatch(members, TIMEOUT_S, found.append)
    watch.look()
    descriptor = create_memory_file()
    members[1].pulse = PulseReader(descriptor)
    with pulse_written_to(descriptor):
        beat(TEARDOWN)
        time.sleep(2 * TIMEOUT_S)
        watch.look()
    os.close(descriptor)
    assert found == []


def test_the_way_out_may_take_longer(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter needs time to leave, however short a collective may take; but it has an end too."""
    assert watched(members, LEAVING, 2 * TIMEOUT_S) == []
    monkeypatch.setattr(_ends, "LEAST_TO_LEAVE_S", TIMEOUT_S)
    assert [record.global_rank for record in watched(members, LEAVING, LONG_S)] == [0]

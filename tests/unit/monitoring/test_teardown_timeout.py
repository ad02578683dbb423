"""A rank that hangs in its teardown is found; one that still works is left alone."""

import time

import pytest

from rankwise.errors import RendezvousTimeoutError
from rankwise.monitoring import stragglers
from rankwise.monitoring.heartbeat import LEAVING, TEARDOWN, MonitoredRank, heartbeat_written_to, report_phase
from rankwise.monitoring.stragglers import TeardownTimeout

TIMEOUT_S = 0.4
LONG_S = 30.0


def watched(
    workers: list[MonitoredRank], heartbeat: int, phase: str, seconds: float
) -> list[tuple[MonitoredRank, Exception]]:
    """Keep rank 1 in a phase for so long, or until it is reported; return what is reported."""
    found: list[tuple[MonitoredRank, Exception]] = []
    watch = TeardownTimeout(workers, TIMEOUT_S, lambda *waiting: found.append(waiting))
    with heartbeat_written_to(heartbeat):
        report_phase(phase)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not found:
            time.sleep(watch.interval_s)
            watch.look()
        watch.look()
    return found


def test_a_teardown_that_hangs(workers: list[MonitoredRank], heartbeats: list[int]) -> None:
    """It is reported once, as a wait of the other rank that has timed out."""
    [(witness, error)] = watched(workers, heartbeats[1], TEARDOWN, LONG_S)
    assert witness is workers[0]
    assert isinstance(error, RendezvousTimeoutError)
    assert "Waited 0.4 s for the end of the job" in str(error)


def test_work_may_take_its_time(
    workers: list[MonitoredRank], heartbeats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank does before its teardown has no limit; its way out has a longer one than a collective."""
    assert watched(workers, heartbeats[1], "running", 2 * TIMEOUT_S) == []
    assert watched(workers, heartbeats[1], LEAVING, 2 * TIMEOUT_S) == []
    monkeypatch.setattr(stragglers, "LEAST_TO_LEAVE_S", TIMEOUT_S)
    assert [witness for witness, _ in watched(workers, heartbeats[1], LEAVING, LONG_S)] == workers[:1]


def test_a_watch_that_was_suspended(workers: list[MonitoredRank], heartbeats: list[int]) -> None:
    """A late look means that this process was suspended, perhaps with the ranks: they get more time."""
    found: list[MonitoredRank] = []
    watch = TeardownTimeout(workers, TIMEOUT_S, lambda witness, error: found.append(witness))
    watch.look()
    with heartbeat_written_to(heartbeats[1]):
        report_phase(TEARDOWN)
        time.sleep(2 * TIMEOUT_S)
        watch.look()
    assert found == []

"""A rank on another host reports times of the launching process's clock."""

import mmap
import os

from rankwise.failures.record import FailureRecord
from rankwise.monitoring.heartbeat import (
    NO_FILE,
    Heartbeat,
    HeartbeatReader,
    contents_of_page,
    heartbeat_written_to,
    own_heartbeat,
    report_phase,
    report_saving,
)
from rankwise.processes.memory_file import create_memory_file
from rankwise.ranks import RankInfo


def test_a_heartbeat_that_is_sent() -> None:
    """The supervisor reads it as if it were in its own memory; nothing sent changes nothing."""
    file = create_memory_file()
    reader = HeartbeatReader(file)
    with heartbeat_written_to(NO_FILE):
        report_phase("backward", step=3, waits=True)
        report_saving(True)
        own = own_heartbeat()
        reader.receive(contents_of_page(100.0))
    reader.receive(b"")
    assert own is not None
    assert reader.read() == Heartbeat(3, own.at_s + 100, True, "backward")
    assert reader.is_saving()
    reader.close()
    assert os.fstat(file).st_size == mmap.PAGESIZE
    os.close(file)


def test_a_failure_that_is_sent() -> None:
    """The time of the failure, and of the rank's last phase, are on the other clock."""
    record = FailureRecord.of_rank(RankInfo(), 5, at_s=7.0, heartbeat=Heartbeat(1, 6.0, False, "forward"))
    moved = record.on_clock_of(-2.0, has_met=False)
    assert (moved.at_s, moved.has_met, moved.pid) == (5.0, False, 5)
    assert moved.heartbeat == Heartbeat(1, 4.0, False, "forward")
    assert FailureRecord.of_rank(RankInfo(), 5, at_s=7.0).on_clock_of(1.0).at_s == 8.0

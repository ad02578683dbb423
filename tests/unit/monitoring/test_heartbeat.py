"""The time of a failure: what the rank does afterwards does not change it."""

from rankwise.monitoring.heartbeat import NO_FILE, failure_time_of, heartbeat_written_to, report_phase


def test_the_first_note_counts() -> None:
    """The heartbeat is that of the failure, whatever is reported later; without one there is a time only."""
    error = RuntimeError()
    with heartbeat_written_to(NO_FILE):
        report_phase("backward", step=3, waits=True)
        noted = failure_time_of(error)
        report_phase("teardown")
        assert failure_time_of(error) is noted
    assert noted.heartbeat is not None
    assert noted.heartbeat.where() == "step 3, backward"
    assert failure_time_of(ValueError()).heartbeat is None

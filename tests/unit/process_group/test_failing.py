"""The moment of a failure: what the rank does afterwards does not change it."""

from __future__ import annotations

from rankwise.process_group.failing import moment_of
from rankwise.process_group.pulse import NO_FILE, beat, pulse_written_to


def test_the_first_note_counts() -> None:
    """A rank is where it was when its work failed, however far its clean-up is when that is reported."""
    error = RuntimeError()
    with pulse_written_to(NO_FILE):
        beat("backward", step=3, waits=True)
        noted = moment_of(error)
        beat("teardown")
        assert moment_of(error) is noted
    assert noted.pulse is not None
    assert noted.pulse.where() == "step 3, backward"


def test_a_process_without_a_pulse() -> None:
    """Where nobody reads where this process is, there is a time and nothing else."""
    assert moment_of(ValueError()).pulse is None

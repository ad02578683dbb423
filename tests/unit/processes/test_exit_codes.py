"""The exit code of a failed job's script: the culprit's, and never 0."""

from __future__ import annotations

import sys

import pytest

from rankwise.errors import WorkerError, WorkerExitedError, WorkerKilledError, WorkerRaisedError
from rankwise.processes.exit_codes import exit_code_kept, exit_code_of

PLACE = (1, 1, 0, 100)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerRaisedError(*PLACE), 1),
        (WorkerKilledError(*PLACE, signal_number=9), 137),
        (WorkerExitedError(*PLACE, exit_code=3), 3),
        (WorkerExitedError(*PLACE, exit_code=0), 1),
        (WorkerExitedError(*PLACE, exit_code=256), 1),
    ],
    ids=["raised", "killed", "exited", "exited early", "more than a byte"],
)
def test_codes(error: WorkerError, code: int) -> None:
    """As a shell gives them."""
    assert exit_code_of(error) == code


def test_pytest_catches_everything() -> None:
    """Here no exception ends the interpreter: no hook is set, and the error comes through."""
    before, error = sys.excepthook, WorkerExitedError(*PLACE, exit_code=3)
    with pytest.raises(WorkerExitedError) as caught, exit_code_kept():
        raise error
    assert caught.value is error
    assert sys.excepthook is before

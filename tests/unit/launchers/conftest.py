"""Fixtures of the unit tests of `rankwise.launchers`."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rankwise.launchers import supervisor
from tests.unit.launchers.supervised import Ends, Job, Supervise, make_job


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the exit codes with which supervisors would end this process, which seems to be a script."""
    codes: list[int] = []
    monkeypatch.setattr(supervisor, "exit_now", codes.append)
    monkeypatch.setattr(supervisor, "is_hosted", lambda: False)
    return codes


@pytest.fixture
def supervise(exits: list[int]) -> Iterator[Supervise]:
    """Return `make_job`, whose jobs are closed after the test, and do not end this process until then."""
    with ExitStack() as cleanup:

        def make(*arguments: int, **options: Any) -> Job:
            job = make_job(*arguments, **options)
            cleanup.callback(job.close)
            return job

        yield make


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return a rank's channel and the supervisor's end of it."""
    made = Ends()
    yield made
    made.close()

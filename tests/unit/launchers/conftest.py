"""Fixtures of the unit tests of `rankwise.launchers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.unit.launchers.supervised import Ends, Job, Supervise, make_job


@pytest.fixture
def supervise() -> Iterator[Supervise]:
    """Return `make_job`, whose jobs are closed after the test."""
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

"""Fixtures of the unit tests: leak checks once per module where they are costly; ranks without processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.monitoring.heartbeat import HeartbeatReader, MonitoredRank
from rankwise.processes.memory_file import create_memory_file
from rankwise.ranks import RankInfo
from tests.helpers import leak_checks


@pytest.fixture(autouse=True, scope="module")
def _tests_that_ran(
    request: pytest.FixtureRequest, temp_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Fail a module whose tests leave something behind that takes long to find; collect their names."""
    with leak_checks.new_marker() as marker:
        checks = leak_checks.costly_checks(marker, tmp_path_factory.getbasetemp())
        names: list[str] = []
        yield names
        leak_checks.fail_if_changed(checks, f"One of the tests of {request.node.nodeid} ({', '.join(names)})")


@pytest.fixture(autouse=True)
def _check_for_leaks(
    request: pytest.FixtureRequest, temp_folder: Path, _tests_that_ran: list[str]
) -> Iterator[None]:
    """Fail a test that leaves something behind that is found at once; other folders have all checks here."""
    _tests_that_ran.append(request.node.name)
    checks = leak_checks.cheap_checks(temp_folder)
    yield
    leak_checks.fail_if_changed(checks, "This test")


@pytest.fixture
def removed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the working directory of this process."""
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.fixture
def heartbeats() -> Iterator[list[int]]:
    """Return the files of the heartbeats of `workers`, which a test may write."""
    descriptors = [create_memory_file() for _ in range(2)]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def workers(heartbeats: list[int]) -> list[MonitoredRank]:
    """Return two ranks that have nothing but a heartbeat, which nobody else writes."""
    return [
        MonitoredRank(RankInfo(rank, rank, 0, 2, 2, 1), None, HeartbeatReader(descriptor))
        for rank, descriptor in enumerate(heartbeats)
    ]

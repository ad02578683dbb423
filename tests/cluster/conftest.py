"""Clusters that are started once for all tests that need them, and stopped after the last.

Their daemons belong to no test, so the police of tests/conftest.py do not see them: they are started before
a test's marker is set, and leave this process's family. What a test runs on them carries its marker along,
and must be gone when the test ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import TwoHosts
from tests.cluster.slurm import SlurmCluster

REQUIRED = "RANKWISE_REQUIRE_CLUSTERS"
"""Set to 1 where a cluster that cannot be had is a failure: .ci/run does so."""


def need(problem: str | None) -> None:
    """Skip the test where there is a problem; fail it where clusters are required."""
    if problem is None:
        return
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but: {problem}", pytrace=False)
    pytest.skip(problem)


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts with addresses of their own."""
    need(TwoHosts.problem())
    both = TwoHosts()
    try:
        both.start()
        yield both
    finally:
        both.stop()


@pytest.fixture(scope="session")
def slurm(hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes."""
    need(SlurmCluster.problem())
    cluster = SlurmCluster(hosts, tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()

"""Clusters that are started once for all tests that need them, and stopped after the last.

Their daemons belong to no test: they start before a test's marker is set and are no descendants of this
process, so the leak checks of tests/conftest.py do not find them. What a test runs on a cluster has its
marker and must end with it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tests.cluster.digits import LIMIT_S, REPOSITORY, VARIABLES
from tests.cluster.hosts import TwoHosts
from tests.cluster.slurm import SlurmCluster
from tests.helpers.scripts import ScriptResult, ScriptRunner

REQUIRED = "RANKWISE_REQUIRE_CLUSTERS"
"""Set to 1 where a cluster that cannot be had is a failure: .ci/run does so."""


OnBoth = Callable[[Sequence[str], Sequence[Mapping[str, str]]], list[ScriptResult]]


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


@pytest.fixture
def on_both(hosts: TwoHosts, run_script: ScriptRunner) -> OnBoth:
    """Run a command on both hosts at once, with variables of each one's own."""

    def run(command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> list[ScriptResult]:
        running = [
            run_script.start_command(hosts.command(name, command), env={**VARIABLES, **own}, cwd=REPOSITORY)
            for name, own in zip(hosts.names, variables, strict=True)
        ]
        return [each.finish(timeout=LIMIT_S) for each in running]

    return run

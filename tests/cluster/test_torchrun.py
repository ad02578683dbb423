"""torchrun on one node and on two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.cluster.digits import BRIEF, EXAMPLES, REPOSITORY, VARIABLES, check_digits, check_doctor
from tests.cluster.hosts import TwoHosts
from tests.helpers.scripts import ScriptResult, ScriptRunner

pytestmark = pytest.mark.cluster

OnBoth = Callable[[Sequence[str], Sequence[dict[str, str]]], list[ScriptResult]]


@pytest.fixture
def on_both(hosts: TwoHosts, run_script: ScriptRunner) -> OnBoth:
    """Run a command on both hosts at once, with variables of each one's own."""

    def run(command: Sequence[str], variables: Sequence[dict[str, str]]) -> list[ScriptResult]:
        running = [
            run_script.start_command(hosts.command(name, command), env={**VARIABLES, **own}, cwd=REPOSITORY)
            for name, own in zip(hosts.names, variables, strict=True)
        ]
        return [each.finish(timeout=110) for each in running]

    return run


def test_one_node(run_script: ScriptRunner) -> None:
    """Two ranks of one torchrun train."""
    command = ["bash", str(EXAMPLES / "torchrun" / "one_node.sh"), *BRIEF]
    result = run_script.command(command, env=VARIABLES, cwd=REPOSITORY, timeout=110)
    assert result.returncode == 0, result
    check_doctor(result.stdout, "torchelastic", world_size=2)
    check_digits(result.stdout, node_ranks=[0, 0])


def test_two_nodes(on_both: OnBoth) -> None:
    """Two torchruns with one rank each, on hosts with addresses of their own, train as one job."""
    variables = {"MAIN_NODE": TwoHosts.names[0]}
    results = on_both(["bash", str(EXAMPLES / "torchrun" / "two_nodes.sh"), *BRIEF], [variables] * 2)
    assert [result.returncode for result in results] == [0, 0], results
    [main] = [
        result.stdout for result in results if result.stdout.strip()
    ]  # the nodes' ranks are torchrun's choice
    check_doctor(main, "torchelastic", world_size=2)
    check_digits(main, node_ranks=[0, 1])
    assert all(name in main for name in TwoHosts.names), main

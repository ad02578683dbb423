"""torchrun on one node and on two, and two nodes by hand."""

import re
import shlex
import time

import pytest

from tests.cluster.conftest import OnBoth
from tests.cluster.digits import BRIEF, EXAMPLES, LIMIT_S, REPOSITORY, VARIABLES, check_digits, check_doctor
from tests.cluster.hosts import TwoHosts, wait_until
from tests.cluster.test_by_hand import SCRIPT, TIMEOUT_S
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]


@pytest.mark.soak  # test_two_nodes trains so, with one rank on each
def test_one_node(run_script: ScriptRunner) -> None:
    """Two ranks of one torchrun train."""
    command = ["bash", str(EXAMPLES / "torchrun" / "one_node.sh"), *BRIEF]
    result = run_script.command(command, env=VARIABLES, cwd=REPOSITORY, timeout=LIMIT_S)
    assert result.returncode == 0, result
    check_doctor(result.stdout, "torchelastic", world_size=2)
    check_digits(result.stdout, node_ranks=[0, 0])


def test_two_nodes(on_both: OnBoth) -> None:
    """Two torchruns with one rank each, on hosts with addresses of their own, train as one job."""
    variables = {"MAIN_NODE": TwoHosts.names[0]}
    script = EXAMPLES / "torchrun" / "two_nodes.sh"
    train = f"grep -v 'rankwise doctor' {shlex.quote(str(script))} | bash -s -- {shlex.join(BRIEF)}"
    results = on_both(["bash", "-c", train], [variables] * 2)
    assert [result.returncode for result in results] == [0, 0], results
    [main] = [each.stdout for each in results if each.stdout.strip()]  # nodes' ranks are torchrun's choice
    check_digits(main, node_ranks=[0, 1])
    assert all(name in main for name in TwoHosts.names), main


@pytest.mark.soak
def test_a_cut_cable(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """The ranks of both nodes end in time, and name each other; torchrun's agents take as long as they do."""
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=cut"]
    script = str(run_script.write(SCRIPT))
    command = [*torchrun, f"--rdzv-endpoint={hosts.names[0]}:29400", script, "popen", "train"]
    variables = {**VARIABLES, **with_tests()}
    running = [run_script.start_command(hosts.command(name, command), env=variables) for name in hosts.names]
    try:
        for each in running:
            each.wait_for("stepping", count=2, timeout=100)
        hosts.cut()
        began = time.monotonic()
        for each in running:
            each.wait_for("left at", count=2, timeout=TIMEOUT_S + 10)
        lost = "NodesLostError: Lost global_rank"
        wait_until(lambda: all(lost in each.stderr for each in running), lost)
        printed = [each.stdout for each in running]
    finally:
        hosts.join()
        for each in running:
            each.kill()
    left = [float(when) - began for text in printed for when in re.findall(r"left at ([\d.]+)", text)]
    assert TIMEOUT_S - 1 <= max(left) < 2 * TIMEOUT_S - 1, (left, printed)


@pytest.mark.soak
def test_two_nodes_by_hand(on_both: OnBoth) -> None:
    """One command on each host; the strategy starts the second rank of each."""
    variables = [{"NODE_RANK": str(rank), "MASTER_ADDR": TwoHosts.names[0]} for rank in range(2)]
    results = on_both(["bash", str(EXAMPLES / "by_hand" / "two_nodes.sh"), *BRIEF], variables)
    assert [result.returncode for result in results] == [0, 0], results
    check_doctor(results[0].stdout, "nodes", world_size=4)
    check_digits(results[0].stdout, node_ranks=[0, 0, 1, 1], hosts=TwoHosts.names)
    assert "global_rank" not in results[1].stdout, results

"""Real launchers of MPI, on one node and on two: Open MPI's mpirun, and MPICH's mpiexec.hydra."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from tests.cluster.conftest import need
from tests.cluster.digits import BRIEF, EXAMPLES, LIMIT_S, REPOSITORY, VARIABLES, check_digits, check_doctor
from tests.cluster.hosts import TwoHosts
from tests.helpers.at_startup.sitecustomize import VARIABLE as COMPARES_RANKS
from tests.helpers.scripts import ScriptResult, ScriptRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]

# A container is root, and may have fewer cores than ranks: mpirun wants to be told that this is meant.
CONTAINER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpiexec.hydra": "mpich"}
ADDRESS = {"MASTER_ADDR": TwoHosts.names[0], "MASTER_PORT": "29500"}
ON_BOTH = {
    "mpirun.openmpi": f"--host {','.join(TwoHosts.names)} "
    f"-x PATH -x PYTHONPATH -x TMPDIR -x {COMPARES_RANKS}",
    "mpiexec.hydra": f"-hosts {','.join(TwoHosts.names)}",
}


def start(launcher: str) -> dict[str, str]:
    need(None if shutil.which(launcher) else f"{launcher} not installed ({PACKAGES[launcher]})")
    return {**VARIABLES, **CONTAINER, "MPIRUN": launcher, "RANKS": "2", "TMPDIR": os.environ["TMPDIR"]}


def check(result: ScriptResult) -> None:
    assert result.returncode == 0, result
    check_doctor(result.stdout, "mpi", world_size=2)


@pytest.mark.soak  # test_two_nodes does the same
@pytest.mark.parametrize("launcher", ["mpiexec.hydra", "mpirun.openmpi"])
def test_digits(launcher: str, run_script: ScriptRunner) -> None:
    """The launcher's two ranks are detected, connect on loopback, and train."""
    command = ["bash", str(EXAMPLES / "mpi" / "digits.sh"), *BRIEF]
    result = run_script.command(command, env=start(launcher), cwd=REPOSITORY, timeout=LIMIT_S)
    check(result)
    check_digits(result.stdout.partition("What to fix")[2], node_ranks=[0, 0])


def on_two_hosts(
    launcher: str,
    hosts: TwoHosts,
    runner: ScriptRunner,
    *command: str,
    more: Mapping[str, str] = MappingProxyType({}),
) -> ScriptResult:
    """Run a command on the first host, from which the launcher starts one rank on each."""
    shell = str(hosts.remote_shell(runner.folder))
    variables = {
        **start(launcher),
        "MPIRUN": f"{launcher} {ON_BOTH[launcher]}",
        "OMPI_MCA_plm_rsh_agent": shell,
        "HYDRA_LAUNCHER_EXEC": shell,
        "HYDRA_IFACE": hosts.interface,
        **more,
    }
    run = hosts.command(hosts.names[0], command)
    return runner.command(run, env=variables, cwd=REPOSITORY, timeout=LIMIT_S)


@pytest.mark.parametrize(
    "launcher", ["mpirun.openmpi", pytest.param("mpiexec.hydra", marks=pytest.mark.soak)]
)
def test_two_nodes(launcher: str, hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """One rank on each of two hosts: they connect at `MASTER_ADDR`, and train."""
    options = " -x MASTER_ADDR -x MASTER_PORT" if launcher == "mpirun.openmpi" else ""
    more = {**ADDRESS, "MPIRUN": f"{launcher} {ON_BOTH[launcher]}{options}"}
    script = str(EXAMPLES / "mpi" / "digits.sh")
    result = on_two_hosts(launcher, hosts, run_script, "bash", script, *BRIEF, more=more)
    check(result)
    assert "rank 0 is at hosta, reached through interface eth0" in result.stdout, result
    check_digits(result.stdout, node_ranks=[0, 1], hosts=hosts.names)


def need_mpi4py() -> None:
    need(None if importlib.util.find_spec("mpi4py") else "mpi4py not installed (rankwise[mpi])")


@pytest.mark.soak
def test_two_nodes_without_an_address(hosts: TwoHosts, run_script: ScriptRunner) -> None:
    """Without `MASTER_ADDR` mpi4py finds rank 0's address."""
    need_mpi4py()
    script = str(EXAMPLES / "mpi" / "digits.sh")
    result = on_two_hosts("mpirun.openmpi", hosts, run_script, "bash", script, *BRIEF)
    check(result)
    address = hosts.addresses[0]
    assert f"rank 0 is at {address}, reached through interface eth0" in result.stdout, result
    check_digits(result.stdout, node_ranks=[0, 1], hosts=hosts.names)


MISSING = "finding rank 0's node under MPI"
BOUND = """
import sys
from rankwise.strategies import DDPStrategy
{before}
DDPStrategy(accelerator="cpu").bind()
"""


@pytest.mark.parametrize(
    ("launcher", "before", "problem"),
    [
        ("mpiexec.hydra", "", "mpi4py: set MASTER_ADDR and MASTER_PORT"),  # it finds Open MPI, or none
        pytest.param(
            *("mpirun.openmpi", "sys.modules['mpi4py'] = None", f"MissingExtraError: {MISSING}"),
            marks=pytest.mark.soak,
        ),
    ],
    ids=["another MPI's", "no mpi4py"],
)
def test_nobody_knows_the_address(
    launcher: str, before: str, problem: str, hosts: TwoHosts, run_script: ScriptRunner
) -> None:
    """Without an address and without mpi4py the error names the variable to set."""
    need_mpi4py()
    path = str(run_script.write(BOUND.format(before=before)))
    words = f"{launcher} {ON_BOTH[launcher]} -n 2 python {path}".split()
    result = on_two_hosts(launcher, hosts, run_script, *words)
    assert result.returncode == 1, result
    for part in problem.split(": ", 1):  # Python may print the class, the colon and the text one by one
        assert part in result.stderr, result
    assert "MASTER_ADDR" in result.stderr, result

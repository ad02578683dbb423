"""Real launchers of MPI: Open MPI's mpirun, and MPICH's mpiexec.hydra."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.cluster.conftest import need
from tests.cluster.digits import BRIEF, EXAMPLES, LIMIT_S, REPOSITORY, VARIABLES, check_digits, check_doctor
from tests.helpers.scripts import ScriptRunner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(220)]

# A container is root, and may have fewer cores than ranks: mpirun wants to be told that this is meant.
CONTAINER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


@pytest.mark.parametrize(
    ("launcher", "package"), [("mpirun.openmpi", "openmpi-bin"), ("mpiexec.hydra", "mpich")]
)
def test_digits(launcher: str, package: str, run_script: ScriptRunner) -> None:
    """The launcher's two ranks are found, meet on loopback, and train."""
    need(None if shutil.which(launcher) else f"{launcher} not installed ({package})")
    variables = {**VARIABLES, **CONTAINER, "MPIRUN": launcher, "RANKS": "2", "TMPDIR": os.environ["TMPDIR"]}
    command = ["bash", str(EXAMPLES / "mpi" / "digits.sh"), *BRIEF]
    result = run_script.command(command, env=variables, cwd=REPOSITORY, timeout=LIMIT_S)
    assert result.returncode == 0, result
    doctor, _, digits = result.stdout.partition("What to fix")
    check_doctor(doctor + "What to fix" + digits, "mpi", world_size=2)
    check_digits(digits, node_ranks=[0, 0])

"""The main address and port from each launcher's variables and files."""

import sys
from pathlib import Path

import pytest

from rankwise.environments import (
    ClusterEnvironment,
    LocalEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    PALSEnvironment,
    SkyPilotEnvironment,
    SlurmEnvironment,
)
from rankwise.environments.network import port_of_job
from rankwise.errors import ConfigurationError, EnvironmentVariableError, MissingExtraError
from tests.unit.environments.variables import hydra, jsrun, open_mpi, pals, skypilot, step, without

FILES = pytest.mark.parametrize(
    ("cls", "variables", "file_variable"),
    [(LSFEnvironment, jsrun(3, 4, 2), "LSB_DJOB_RANKFILE"), (PALSEnvironment, pals(), "PBS_NODEFILE")],
    ids=["lsf", "pals"],
)


@FILES
def test_nodes_of_a_file(
    cls: type[ClusterEnvironment], variables: dict[str, str], file_variable: str, tmp_path: Path
) -> None:
    """The first is rank 0's, unless `MASTER_ADDR` is set; the second is `other_node`, if there is one."""
    path = tmp_path / "hosts"
    path.write_text("node7\nnode7\nnode8\nnode8\n")
    assert cls({**variables, file_variable: str(path)}).main_address == "node7"
    assert cls({**variables, file_variable: str(path), "MASTER_ADDR": "head"}).main_address == "head"
    assert cls({**variables, file_variable: str(path)}).other_node == "node8"
    path.write_text("node7\n")
    assert cls({**variables, file_variable: str(path)}).other_node is None
    assert cls({**without(variables, file_variable), "MASTER_ADDR": "head"}).other_node is None


@pytest.mark.parametrize("launch_node", ["batch2", "login1", "cn-launch"])
def test_lsf_skips_the_launch_node(launch_node: str, tmp_path: Path) -> None:
    """If the file begins with a launch node, the next one is rank 0's."""
    path = tmp_path / "hosts"
    path.write_text(f"{launch_node}\nnode7\nnode7\nnode8\n")
    assert LSFEnvironment({**jsrun(3, 4, 2), "LSB_DJOB_RANKFILE": str(path)}).main_address == "node7"


@FILES
def test_a_file_without_nodes(
    cls: type[ClusterEnvironment], variables: dict[str, str], file_variable: str, tmp_path: Path
) -> None:
    """A file that is missing, empty or not text, or has no variable, is an error that names the variable."""
    path = tmp_path / "hosts"
    for content in (None, b"", b" \n\n", b"\xff\xfe\x00"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(EnvironmentVariableError, match=file_variable):
            cls({**variables, file_variable: str(path)}).main_address  # noqa: B018  the property raises
    with pytest.raises(EnvironmentVariableError, match=f"{file_variable} is not set"):
        cls(without(variables, file_variable)).main_address  # noqa: B018  the property raises


def test_two_jobs_do_not_share_a_port() -> None:
    """Steps of one job, jobs of an array and other jobs all have different ports."""
    ports = {
        SlurmEnvironment({**step(), "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number)}).main_port
        for job in range(1042, 1052)
        for number in range(20)
    }
    assert len(ports) == 200
    apart = [LSFEnvironment({**jsrun(), "LSB_JOBINDEX": str(index)}).main_port for index in range(100)]
    assert len(set(apart)) == 100


def test_a_malformed_list_of_slurm_is_an_error_beside_an_address() -> None:
    """With `MASTER_ADDR` the list still determines the network interface."""
    variables = {**step(per_node="1(x2)"), "MASTER_ADDR": "n1"}
    assert SlurmEnvironment({**variables, "SLURM_STEP_NODELIST": "n[1-2]"}).other_node == "n2"
    with pytest.raises(EnvironmentVariableError, match="SLURM_STEP_NODELIST"):
        SlurmEnvironment({**variables, "SLURM_STEP_NODELIST": "n[2-1]"}).other_node  # noqa: B018 -- it raises


def test_a_local_job_has_no_port_beforehand() -> None:
    """The error says that the port is chosen when the ranks are started."""
    with pytest.raises(ConfigurationError, match="no main_port that could be known beforehand") as caught:
        LocalEnvironment({}).main_port  # noqa: B018  the property raises
    assert not isinstance(caught.value, EnvironmentVariableError)
    assert 'os.environ["MASTER_PORT"] within a rank' in str(caught.value)
    assert LocalEnvironment({"MASTER_PORT": "29500"}).main_port == 29500


@pytest.mark.parametrize("variables", [open_mpi(1, 2), hydra(1, 2)], ids=["openmpi", "hydra"])
def test_mpi_on_one_node_is_on_loopback(variables: dict[str, str]) -> None:
    """On one node the address is loopback, because no variable contains it."""
    environment = MPIEnvironment(variables)
    assert environment.main_address == "127.0.0.1"
    assert 20_000 <= environment.main_port < 32_000


def test_mpi_on_several_nodes_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpi4py and `MASTER_ADDR` the error names both."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as where it is not installed
    with pytest.raises(MissingExtraError, match=r"mpi4py.*MASTER_ADDR|MASTER_ADDR.*mpi4py"):
        MPIEnvironment(open_mpi(3, 4, 1, 2)).main_address  # noqa: B018  the property raises


def test_mpi4py_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpi4py without an MPI library has another error than one that is not installed."""
    problem = "libmpi.so.12: cannot open shared object file"
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(f"raise ImportError({problem!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    with pytest.raises(ConfigurationError, match=f"(?s){problem}.*set MASTER_ADDR") as caught:
        MPIEnvironment(open_mpi(3, 4, 1, 2)).main_address  # noqa: B018  the property raises
    assert not isinstance(caught.value, MissingExtraError)
    sys.modules.pop("mpi4py", None)


def test_mpi_with_half_an_address() -> None:
    """Hydra has no job id to compute a port from: an address requires a port."""
    variables = {**hydra(3, 4, 2), "MASTER_ADDR": "gpu01"}
    with pytest.raises(EnvironmentVariableError, match="MASTER_ADDR is set, but MASTER_PORT is not"):
        MPIEnvironment(variables).main_port  # noqa: B018  the property raises
    assert MPIEnvironment({**variables, "MASTER_PORT": "29500"}).main_port == 29500


def test_skypilot() -> None:
    """The first node's address, and a port from the task's id; `MASTER_*` overrides both."""
    environment = SkyPilotEnvironment(skypilot())
    assert (environment.main_address, environment.other_node) == ("10.0.0.1", "10.0.0.2")
    assert environment.main_port == port_of_job([skypilot()["SKYPILOT_TASK_ID"]])
    given = SkyPilotEnvironment({**skypilot(), "MASTER_ADDR": "head", "MASTER_PORT": "5000"})
    assert (given.main_address, given.main_port) == ("head", 5000)
    with pytest.raises(EnvironmentVariableError, match="MASTER_PORT is not set"):
        SkyPilotEnvironment(without(skypilot(), "SKYPILOT_TASK_ID")).main_port  # noqa: B018  it raises

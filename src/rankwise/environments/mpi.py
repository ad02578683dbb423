"""Launchers of MPI programs: Open MPI's `mpirun`, Hydra's `mpiexec`, LSF's `jsrun`, HPE's PALS."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, final

from rankwise.environments.base import ClusterEnvironment, is_set
from rankwise.environments.network import LOOPBACK, address_toward, port_of_job
from rankwise.errors import ConfigurationError, MissingExtraError

# Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
_OPEN_MPI: Mapping[str, str] = {
    "global_rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
# Source: MPICH's PMI-1 wire protocol and hydra's documentation; Intel MPI's mpiexec.hydra sets the same
_HYDRA: Mapping[str, str] = {
    "global_rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_world_size": "MPI_LOCALNRANKS",
}
_LAUNCH_NODES = ("batch", "login")  # how the names of LSF's launch nodes begin


@final
class MPIEnvironment(ClusterEnvironment):
    """A rank that `mpirun` or `mpiexec` has started. It reads variables and does not use MPI itself.

    No variable of these launchers contains rank 0's address. On one node it is loopback. On several nodes it
    is `MASTER_ADDR` (with `MASTER_PORT`), or else rank 0 broadcasts it with mpi4py, which every rank must be
    able to import.

    `PMI_RANK` and `PMI_SIZE` do not identify a launcher: `srun --mpi=pmi2` and PALS set them too.
    """

    name = "mpi"
    variables: ClassVar[Mapping[str, str]] = _OPEN_MPI
    job_variables = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")

    @classmethod
    def table(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return Hydra's names if only these are set, Open MPI's otherwise."""
        return _HYDRA if not _set_in(_OPEN_MPI, environ) and _set_in(_HYDRA, environ) else _OPEN_MPI

    @classmethod
    def detected_markers(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables that are set and that only a launcher of MPI sets."""
        return tuple(name for name in _set_in(cls.table(environ), environ) if not name.startswith("PMI_"))

    @property
    def main_address(self) -> str:
        """`MASTER_ADDR`; or loopback on one node; or the address that rank 0 broadcasts with mpi4py.

        Collective: on several nodes without `MASTER_ADDR`, every rank must read this.

        Raises:
            MissingExtraError: when mpi4py is required and not installed.
            ConfigurationError: when mpi4py finds no MPI library.
            EnvironmentVariableError: when mpi4py uses another MPI than the one that started the job.
        """
        if self._knows("main_address"):
            return super().main_address
        return LOOPBACK if self.num_nodes == 1 else self._broadcast_endpoint[0]

    @property
    def main_port(self) -> int:
        """`MASTER_PORT`; or computed from the job's id; or the port that rank 0 broadcasts with mpi4py."""
        if self._knows("main_port") or any(map(self._has, self.job_variables)):
            return super().main_port
        if self.num_nodes == 1:
            return port_of_job([_launcher_pid()])
        if self._knows("main_address"):
            raise self._error("MASTER_ADDR is set, but MASTER_PORT is not")
        return self._broadcast_endpoint[1]

    @cached_property
    def _broadcast_endpoint(self) -> tuple[str, int]:
        communicator = _mpi4py_world()
        if communicator.Get_size() != self.world_size:
            raise self._error(
                f"mpi4py sees {communicator.Get_size()} ranks: it was built with another MPI than the one "
                "that started this job, so set MASTER_ADDR and MASTER_PORT instead"
            )
        hosts = communicator.allgather(socket.gethostname())
        others = [host for host in hosts if host != hosts[0]]
        own = (address_toward(others[0]) if others else LOOPBACK, port_of_job([str(os.getpid())]))
        endpoint: tuple[str, int] = communicator.bcast(own, root=0)
        return endpoint


@final
class LSFEnvironment(ClusterEnvironment):
    """A task that `jsrun` has started. A `bsub` script without jsrun is one process, and no step.

    The address of rank 0's node is `MASTER_ADDR`, or the first compute node in the file `LSB_DJOB_RANKFILE`.
    On clusters with launch nodes, the first line of that file is the launch node.

    Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0 (LSB_*), and IBM's jsrun manual (JSM_NAMESPACE_*)
    """

    name = "lsf"
    markers = ("JSM_NAMESPACE_RANK",)
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "JSM_NAMESPACE_RANK",
        "world_size": "JSM_NAMESPACE_SIZE",
        "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
        "local_world_size": "JSM_NAMESPACE_LOCAL_SIZE",
    }
    required = ("LSB_JOBID",)
    job_variables = ("LSB_JOBID", "LSB_JOBINDEX", "JSM_NAMESPACE_ID")
    node_file = "LSB_DJOB_RANKFILE"

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why jsrun has not started this process."""
        reason = super().rejection(environ)
        if reason and is_set("LSB_JOBID", environ):
            return "this is the job's own script (JSM_NAMESPACE_RANK is not set): jsrun has not started it"
        return reason

    def _node_names(self) -> list[str]:
        hosts = super()._node_names()
        has_launch_node = len(hosts) > self.num_nodes or hosts[0].startswith(_LAUNCH_NODES)
        names = hosts[1:] if has_launch_node else hosts
        if not names:
            raise self._error("LSB_DJOB_RANKFILE names no compute node")
        return names


@final
class PALSEnvironment(ClusterEnvironment):
    """A rank that PALS has started.

    The address of rank 0's node is `MASTER_ADDR`, or the first line of the file `PBS_NODEFILE`.

    Source: HPE's PALS manual; https://docs.alcf.anl.gov/running-jobs
    """

    name = "pals"
    markers = ("PALS_RANKID",)
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "PALS_RANKID",
        "world_size": "PMI_SIZE",
        "local_rank": "PALS_LOCAL_RANKID",
        "local_world_size": "PMI_LOCAL_SIZE",
        "node_rank": "PALS_NODEID",
    }
    job_variables = ("PBS_JOBID", "PALS_APID")
    node_file = "PBS_NODEFILE"


def _set_in(table: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    return [name for name in table.values() if is_set(name, environ)]


def _mpi4py_world() -> Any:
    try:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]  # an optional extra
    except ModuleNotFoundError:
        raise MissingExtraError(
            package="mpi4py",
            extra="mpi",
            purpose="finding rank 0's node under MPI (or else setting MASTER_ADDR and MASTER_PORT)",
        ) from None
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            message=f"mpi4py, which is needed to find rank 0's node, cannot be loaded: {error}.",
            remedy="set MASTER_ADDR and MASTER_PORT, or install mpi4py for the MPI that started this job.",
        ) from None
    return MPI.COMM_WORLD


def _launcher_pid() -> str:
    """Return the id of the process that started this rank, also through shells.

    Hydra starts each rank in a new session, so the launcher is the parent of the session's leader.
    """
    leader = os.getsid(0)
    try:
        fields = Path(f"/proc/{leader}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return str(os.getppid())
    return fields[1]

"""MPI's launchers: Open MPI's `mpirun`, and Hydra's `mpiexec` (MPICH, Intel MPI)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, final

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.network import address_toward, port_of_job
from rankwise.errors import ConfigurationError, MissingExtraError

__all__ = ["MPIEnvironment"]

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
_LOOPBACK = "127.0.0.1"


@final
class MPIEnvironment(ClusterEnvironment):
    """A rank that `mpirun` or `mpiexec` has started. Its variables are read; MPI itself is not used.

    No launcher of MPI says where rank 0 is. On one node that is loopback. On several, `MASTER_ADDR` (and
    `MASTER_PORT`) say it, or else mpi4py is asked, which every rank must be able to import.

    `PMI_RANK` and `PMI_SIZE` alone prove nothing: `srun --mpi=pmi2` and PALS set them too.
    """

    name = "mpi"
    variables: ClassVar[Mapping[str, str]] = _OPEN_MPI
    optional = ("MASTER_ADDR", "MASTER_PORT")

    @classmethod
    def table(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return Hydra's names where only Hydra was at work, Open MPI's otherwise."""
        return _HYDRA if not _set(_OPEN_MPI, environ) and _set(_HYDRA, environ) else _OPEN_MPI

    @classmethod
    def detected_markers(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return what only a launcher of MPI sets."""
        return tuple(name for name in _set(cls.table(environ), environ) if not name.startswith("PMI_"))

    @property
    def main_address(self) -> str:
        """`MASTER_ADDR`; loopback on one node; otherwise what rank 0 says through mpi4py.

        Collective: on several nodes without `MASTER_ADDR`, every rank must ask.

        Raises:
            MissingExtraError: when mpi4py is needed and is not there.
            ConfigurationError: when it is there but finds no library of MPI.
            EnvironmentVariableError: when it belongs to another MPI than the one that started the job.
        """
        if self._values.has("MASTER_ADDR"):
            return self._values.text("MASTER_ADDR")
        return _LOOPBACK if self.num_nodes == 1 else self._meeting_place[0]

    @property
    def main_port(self) -> int:
        """`MASTER_PORT`; or from the job's id; otherwise what rank 0 says through mpi4py."""
        if self._values.has("MASTER_PORT"):
            return super().main_port
        job = self._values.first_set("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
        if job is not None:
            return port_of_job([self._values.text(job)])
        if self.num_nodes == 1:
            return port_of_job([_launcher_of_this_session()])
        if self._values.has("MASTER_ADDR"):
            raise self._values.error("MASTER_ADDR is set, but MASTER_PORT is not", self.seen())
        return self._meeting_place[1]

    @cached_property
    def _meeting_place(self) -> tuple[str, int]:
        communicator = _world_of_mpi4py()
        if communicator.Get_size() != self.world_size:
            raise self._values.error(
                f"mpi4py sees {communicator.Get_size()} ranks: it was built with another MPI than the one "
                "that started this job, so set MASTER_ADDR and MASTER_PORT instead",
                self.seen(),
            )
        hosts = communicator.allgather(socket.gethostname())
        others = [host for host in hosts if host != hosts[0]]
        mine = (address_toward(others[0]) if others else _LOOPBACK, port_of_job([str(os.getpid())]))
        place: tuple[str, int] = communicator.bcast(mine, root=0)
        return place


def _set(table: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    return [name for name in table.values() if environ.get(name, "").strip()]


def _world_of_mpi4py() -> Any:
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
            message=f"mpi4py, which would say where rank 0 is, cannot be loaded: {error}.",
            remedy="set MASTER_ADDR and MASTER_PORT, or install mpi4py for the MPI that started this job.",
        ) from None
    return MPI.COMM_WORLD


def _launcher_of_this_session() -> str:
    """Return the id of the process that started this rank, however many shells lie between.

    Hydra starts each rank in a session of its own, so the launcher is the parent of the session's leader.
    """
    leader = os.getsid(0)
    try:
        fields = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(os.getppid())
    return fields[1]

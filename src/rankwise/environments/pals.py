"""PALS, HPE's launcher under PBS (`mpiexec` and `aprun` on Cray EX)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment


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
    optional = ("PBS_NODEFILE", "MASTER_ADDR", "MASTER_PORT")
    job_variables = ("PBS_JOBID", "PALS_APID")

    def _node_names(self) -> list[str]:
        names = self._values.hosts_in_file("PBS_NODEFILE")
        if not names:
            raise self._values.error("PBS_NODEFILE names no node", self.seen())
        return names

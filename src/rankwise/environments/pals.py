"""PALS, HPE's launcher under PBS (`mpiexec` and `aprun` on Cray EX)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment
from rankwise.errors import EnvironmentVariableError

__all__ = ["PALSEnvironment"]

_MOST_BYTES = 16_000_000


@final
class PALSEnvironment(ClusterEnvironment):
    """A rank that PALS has started.

    The address of rank 0's node is `MASTER_ADDR`, or the first line of `PBS_NODEFILE`.

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

    @property
    def main_address(self) -> str:
        """`MASTER_ADDR`, or the first node of the job's node file.

        Raises:
            EnvironmentVariableError: when there is no node file, or it is empty.
        """
        if self._values.has("MASTER_ADDR"):
            return self._values.text("MASTER_ADDR")
        return self._nodes()[0]

    @property
    def other_node(self) -> str | None:
        """The second node of the job's node file, where there is one."""
        with suppress(EnvironmentVariableError):
            return next(iter(self._nodes()[1:]), None)
        return None

    def _nodes(self) -> list[str]:
        path = self._values.text("PBS_NODEFILE")
        try:
            with Path(path).open(encoding="utf-8") as file:
                nodes = list(dict.fromkeys(file.read(_MOST_BYTES).split()))
        except (OSError, ValueError) as error:
            raise self._values.error(f"PBS_NODEFILE cannot be read: {error}", self.seen()) from None
        if not nodes:
            raise self._values.error("PBS_NODEFILE names no node", self.seen())
        return nodes

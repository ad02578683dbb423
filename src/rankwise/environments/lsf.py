"""LSF with `jsrun`, IBM's Job Step Manager."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment
from rankwise.errors import EnvironmentVariableError

__all__ = ["LSFEnvironment"]

_MOST_BYTES = 16_000_000
_LAUNCH_NODES = ("batch", "login")


@final
class LSFEnvironment(ClusterEnvironment):
    """A task that `jsrun` has started. In a `bsub` script without jsrun there is one process, and no step.

    The address of rank 0's node is `MASTER_ADDR`, or the first compute node of `LSB_DJOB_RANKFILE`, whose
    first line names the launch node on clusters that have one.

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
    optional = ("LSB_DJOB_RANKFILE", "MASTER_ADDR", "MASTER_PORT")
    job_variables = ("LSB_JOBID", "LSB_JOBINDEX", "JSM_NAMESPACE_ID")

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why jsrun has not started this process."""
        reason = super().rejection(environ)
        if reason and environ.get("LSB_JOBID", "").strip():
            return "this is the job's own script (JSM_NAMESPACE_RANK is not set): jsrun has not started it"
        return reason

    @property
    def main_address(self) -> str:
        """`MASTER_ADDR`, or the first compute node of the job's rank file.

        Raises:
            EnvironmentVariableError: when there is no rank file, or it names no node.
        """
        if self._values.has("MASTER_ADDR"):
            return self._values.text("MASTER_ADDR")
        return self._compute_nodes()[0]

    @property
    def other_node(self) -> str | None:
        """The second compute node of the job's rank file, where there is one."""
        with suppress(EnvironmentVariableError):
            return next(iter(self._compute_nodes()[1:]), None)
        return None

    def _compute_nodes(self) -> list[str]:
        path = self._values.text("LSB_DJOB_RANKFILE")
        try:
            with Path(path).open(encoding="utf-8") as file:
                hosts = list(dict.fromkeys(file.read(_MOST_BYTES).split()))
        except (OSError, ValueError) as error:
            raise self._values.error(f"LSB_DJOB_RANKFILE cannot be read: {error}", self.seen()) from None
        has_launch_node = len(hosts) > self.num_nodes or "".join(hosts[:1]).startswith(_LAUNCH_NODES)
        compute = hosts[1:] if has_launch_node else hosts
        if not compute:
            raise self._values.error("LSB_DJOB_RANKFILE names no compute node", self.seen())
        return compute

"""LSF with `jsrun`, IBM's Job Step Manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment, is_set

_LAUNCH_NODES = ("batch", "login")


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
    optional = ("LSB_DJOB_RANKFILE", "MASTER_ADDR", "MASTER_PORT")
    job_variables = ("LSB_JOBID", "LSB_JOBINDEX", "JSM_NAMESPACE_ID")

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why jsrun has not started this process."""
        reason = super().rejection(environ)
        if reason and is_set("LSB_JOBID", environ):
            return "this is the job's own script (JSM_NAMESPACE_RANK is not set): jsrun has not started it"
        return reason

    def _node_names(self) -> list[str]:
        hosts = self._values.hosts_in_file("LSB_DJOB_RANKFILE")
        has_launch_node = len(hosts) > self.num_nodes or "".join(hosts[:1]).startswith(_LAUNCH_NODES)
        names = hosts[1:] if has_launch_node else hosts
        if not names:
            raise self._values.error("LSB_DJOB_RANKFILE names no compute node", self.seen())
        return names

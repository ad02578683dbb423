"""Processes started by hand, or by a launcher that sets only the variables torch itself reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment

__all__ = ["PlainEnvironment"]


@final
class PlainEnvironment(ClusterEnvironment):
    """`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`, all five.

    `LOCAL_WORLD_SIZE` and `NODE_RANK` (or `GROUP_RANK`) are read where they are set; without them the job is
    taken to be on one node when `LOCAL_RANK` equals `RANK`, and must otherwise say its `LOCAL_WORLD_SIZE`.
    """

    name = "plain"
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    optional = ("LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")

    @property
    def local_world_size(self) -> int:
        """`LOCAL_WORLD_SIZE`, or the world size where rank and local rank are the same.

        Raises:
            EnvironmentVariableError: when several nodes must be meant but their size is not said.
        """
        if self._values.environ.get("LOCAL_WORLD_SIZE"):
            return self._values.number("LOCAL_WORLD_SIZE")
        if self.local_rank != self.global_rank:
            raise self._values.error(
                "LOCAL_RANK differs from RANK, so there are several nodes, but LOCAL_WORLD_SIZE is not set",
                self.seen(),
            )
        return self.world_size

    @property
    def node_rank(self) -> int:
        """`NODE_RANK` or `GROUP_RANK`, or derived from equal nodes."""
        for variable in ("NODE_RANK", "GROUP_RANK"):
            if self._values.environ.get(variable):
                return self._values.number(variable)
        return super().node_rank

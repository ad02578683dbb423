"""Processes started by hand, or by a launcher that sets torch's variables: one per rank or one per node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment, is_set


@final
class PlainEnvironment(ClusterEnvironment):
    """One process for each rank, with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`.

    `LOCAL_WORLD_SIZE` and `NODE_RANK` (or `GROUP_RANK`) are optional. Without `LOCAL_WORLD_SIZE`,
    `LOCAL_RANK` must equal `RANK`, which means one node.
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
        """`LOCAL_WORLD_SIZE`, or the world size if rank and local rank are equal.

        Raises:
            EnvironmentVariableError: when there are several nodes of unknown size.
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
        """`NODE_RANK` or `GROUP_RANK`, or derived from nodes of equal size."""
        for variable in ("NODE_RANK", "GROUP_RANK"):
            if self._values.environ.get(variable):
                return self._values.number(variable)
        return super().node_rank


class NodesEnvironment(ClusterEnvironment):
    """One process for each node: `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT`, and no `RANK`.

    The number of nodes is `NNODES` or the trainer's `num_nodes`, the number of processes on each node the
    trainer's `devices`. The strategy starts the other processes of the node. Node 0 hosts the store, at
    `MASTER_ADDR` and `MASTER_PORT`.

    The ranks are those of a job with one process on each node, as before the strategy starts the others.
    """

    name = "nodes"
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "NODE_RANK",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    optional: ClassVar[tuple[str, ...]] = ("NNODES",)
    constants: ClassVar[Mapping[str, int]] = {"local_rank": 0, "local_world_size": 1}
    creates_processes_externally = False

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this process does not stand for a node."""
        if is_set("RANK", environ):
            return "RANK is set: whoever set it has started a process for each rank"
        return super().rejection(environ)

    @property
    def has_num_nodes(self) -> bool:
        """Whether a variable contains the number of nodes."""
        return self._values.has("NNODES")

    @property
    def processes_per_node(self) -> int | None:
        """None: no variable contains it."""
        return None

    @property
    def num_nodes(self) -> int:
        """`NNODES`; if it is not set, the smallest number that includes this node."""
        return self._values.number("NNODES") if self.has_num_nodes else self.node_rank + 1

    @property
    def global_rank(self) -> int:
        """The node's rank, with one process on each node."""
        return self.node_rank

    @property
    def world_size(self) -> int:
        """The number of nodes, with one process on each node."""
        return self.num_nodes

"""Several nodes by hand: one process was started on each, and the strategy starts the others there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rankwise.environments.base import ClusterEnvironment

__all__ = ["NodesEnvironment"]


class NodesEnvironment(ClusterEnvironment):
    """One process on each node: `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT`, and no `RANK`.

    How many nodes there are, `NNODES` or the trainer's `num_nodes` says. How many processes run on each, the
    trainer's `devices` says. Node 0 hosts the store, at `MASTER_ADDR` and `MASTER_PORT`.

    The ranks that this environment gives are those of a job with one process on each node: what exists
    before the strategy has started anything.
    """

    name = "nodes"
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "NODE_RANK",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    optional: ClassVar[tuple[str, ...]] = ("NNODES",)

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this is no process of a job that was started node by node."""
        if environ.get("RANK", "").strip():
            return "RANK is set: whoever set it has started a process for each rank"
        return super().rejection(environ)

    @property
    def creates_processes_externally(self) -> bool:
        """False: the strategy starts the other processes of this node."""
        return False

    @property
    def has_num_nodes(self) -> bool:
        """Whether a variable says how many nodes there are."""
        return self._values.has("NNODES")

    @property
    def processes_per_node(self) -> int | None:
        """How many processes a variable wants on each node, None where none says it."""
        return None

    @property
    def num_nodes(self) -> int:
        """`NNODES`, or the least that there must be where it is not set."""
        return self._values.number("NNODES") if self.has_num_nodes else self.node_rank + 1

    @property
    def global_rank(self) -> int:
        """The node's, as long as there is one process on each."""
        return self.node_rank

    @property
    def world_size(self) -> int:
        """The number of nodes, as long as there is one process on each."""
        return self.num_nodes

    @property
    def local_rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def local_world_size(self) -> int:
        """Always 1: the processes that exist now."""
        return 1

"""Kubeflow's training operator: the pods of a PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.nodes import NodesEnvironment

__all__ = ["KubeflowEnvironment"]


@final
class KubeflowEnvironment(NodesEnvironment):
    """A pod of a PyTorchJob: one process, from which the strategy starts those that the pod is to have.

    `RANK` is the pod's, whatever `nprocPerNode` says; `WORLD_SIZE` counts pods times `nprocPerNode`. `PET_*`
    are what torchrun would read; where the operator sets them, they must agree. With `nprocPerNode: auto`
    (the operator's default) `devices` decides.

    Source: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
    """

    name = "kubeflow"
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "RANK",
        "world_size": "WORLD_SIZE",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    required = ("KUBERNETES_SERVICE_HOST",)
    optional = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "HOSTNAME")

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this is no pod's own process of a PyTorchJob."""
        if environ.get("LOCAL_RANK", "").strip():
            return "LOCAL_RANK is set: somebody has started this process inside of the pod"
        return super(NodesEnvironment, cls).rejection(environ)

    @property
    def has_num_nodes(self) -> bool:
        """Always True: `WORLD_SIZE` and `nprocPerNode` say it."""
        return True

    @property
    def processes_per_node(self) -> int | None:
        """`PET_NPROC_PER_NODE` where it is a number ("auto", "gpu" and "cpu" leave it open)."""
        variable = "PET_NPROC_PER_NODE"
        is_open = not self._values.has(variable) or self._values.text(variable) in ("auto", "gpu", "cpu")
        return None if is_open else self._values.number(variable, lowest=1)

    @property
    def node_rank(self) -> int:
        """The pod's `RANK`."""
        rank = self._values.number("RANK")
        if self._values.has("PET_NODE_RANK") and self._values.number("PET_NODE_RANK") != rank:
            raise self._values.error("RANK and PET_NODE_RANK are not the same", self.seen())
        return rank

    @property
    def num_nodes(self) -> int:
        """The number of pods."""
        world_size = self._values.number("WORLD_SIZE", lowest=1)
        per_node = self.processes_per_node or 1
        if not self._values.has("PET_NNODES") and world_size % per_node == 0:
            return world_size // per_node
        nodes = self._values.number("PET_NNODES", lowest=1)
        if world_size not in (nodes, nodes * per_node):
            raise self._values.error("WORLD_SIZE is not PET_NNODES times PET_NPROC_PER_NODE", self.seen())
        return nodes

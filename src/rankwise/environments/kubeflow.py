"""Kubeflow's training operator: the pods of a PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import is_set
from rankwise.environments.plain import NodesEnvironment


@final
class KubeflowEnvironment(NodesEnvironment):
    """A pod of a PyTorchJob: one process, from which the strategy starts the other processes of the pod.

    `RANK` is the pod's, for any `nprocPerNode`; `WORLD_SIZE` is the number of pods times `nprocPerNode`. The
    variables `PET_*` are torchrun's; if the operator sets them, they must agree. With `nprocPerNode: auto`
    (the operator's default) `devices` gives the number of processes.

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
    has_num_nodes = True  # it follows from `WORLD_SIZE` and `nprocPerNode`

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this is not the first process of a pod of a PyTorchJob."""
        if is_set("LOCAL_RANK", environ):
            return "LOCAL_RANK is set: a launcher in the pod has started this process"
        return super(NodesEnvironment, cls).rejection(environ)

    @property
    def processes_per_node(self) -> int | None:
        """`PET_NPROC_PER_NODE` if it is a number; None for "auto", "gpu" and "cpu"."""
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

"""Environments of one process for each node, from which the strategy starts the node's other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment, is_set


class NodesEnvironment(ClusterEnvironment):
    """One process for each node: `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT`, and no `RANK`.

    The number of nodes is `NNODES` or the trainer's `num_nodes`, the number of processes on each node the
    trainer's `devices`. The strategy starts the other processes of the node. Node 0 hosts the store, at
    `MASTER_ADDR` and `MASTER_PORT`.

    A subclass has a table with its own variables. It may have one for the further fact `processes_per_node`,
    which `devices` must then agree with.

    The ranks are the ranks of a job with one process on each node: the strategy has not started the others
    yet.
    """

    name = "nodes"
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "NODE_RANK",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    optional_variables: ClassVar[Mapping[str, str]] = {
        **ClusterEnvironment.optional_variables,
        "num_nodes": "NNODES",
    }
    constants: ClassVar[Mapping[str, int]] = {"local_rank": 0, "local_world_size": 1}
    creates_processes_externally = False

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this process does not stand for a node."""
        if is_set("RANK", environ) and "RANK" not in cls.table(environ).values():
            return "RANK is set: whoever set it has started a process for each rank"
        return super().rejection(environ)

    @property
    def processes_per_node(self) -> int | None:
        """The number in the variable for it, if it is set; None for torchrun's "auto", "gpu" and "cpu"."""
        variable = self._table.get("processes_per_node", "")
        is_open = not self._has(variable) or self._text(variable) in ("auto", "gpu", "cpu")
        return None if is_open else self._number(variable, lowest=1)

    @property
    def has_num_nodes(self) -> bool:
        """Whether a variable contains the number of nodes."""
        return self._has(self._table.get("num_nodes", ""))

    @property
    def num_nodes(self) -> int:
        """The variable's number; if it is not set, the smallest number that includes this node."""
        return self._fact("num_nodes") if self.has_num_nodes else self.node_rank + 1

    @property
    def global_rank(self) -> int:
        """The node's rank, with one process on each node."""
        return self.node_rank

    @property
    def world_size(self) -> int:
        """The number of nodes, with one process on each node."""
        return self.num_nodes


@final
class KubeflowEnvironment(NodesEnvironment):
    """A pod of a PyTorchJob (Kubeflow's training operator, v1), which has one process for each pod.

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
    optional_variables: ClassVar[Mapping[str, str]] = {"processes_per_node": "PET_NPROC_PER_NODE"}
    required = ("KUBERNETES_SERVICE_HOST",)
    optional = ("PET_NNODES", "PET_NODE_RANK", "HOSTNAME")
    has_num_nodes = True  # it follows from `WORLD_SIZE` and `nprocPerNode`

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this is not the first process of a pod of a PyTorchJob."""
        if is_set("LOCAL_RANK", environ):
            return "LOCAL_RANK is set: a launcher in the pod has started this process"
        return super().rejection(environ)

    @property
    def node_rank(self) -> int:
        """The pod's `RANK`."""
        rank = self._fact("node_rank")
        if self._has("PET_NODE_RANK") and self._number("PET_NODE_RANK") != rank:
            raise self._error("RANK and PET_NODE_RANK are not the same")
        return rank

    @property
    def num_nodes(self) -> int:
        """The number of pods."""
        world_size = self._number("WORLD_SIZE", lowest=1)
        per_node = self.processes_per_node or 1
        if not self._has("PET_NNODES") and world_size % per_node == 0:
            return world_size // per_node
        nodes = self._number("PET_NNODES", lowest=1)
        if world_size not in (nodes, nodes * per_node):
            raise self._error("WORLD_SIZE is not PET_NNODES times PET_NPROC_PER_NODE")
        return nodes


@final
class TrainJobEnvironment(NodesEnvironment):
    """A pod of a TrainJob (Kubeflow Trainer v2), or another process with torchrun's options as variables.

    It has one process for each pod: torchrun, which reads these variables, has not been started.

    Source: https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/
    """

    name = "trainjob"
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "PET_NODE_RANK",
        "num_nodes": "PET_NNODES",
        "main_address": "PET_MASTER_ADDR",
        "main_port": "PET_MASTER_PORT",
    }
    optional_variables: ClassVar[Mapping[str, str]] = {"processes_per_node": "PET_NPROC_PER_NODE"}
    remedy = (
        "start the script with torchrun, which takes its options from the variables PET_*; or set "
        "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, as a TrainJob does, for one process "
        "on each node; or RANKWISE_ENVIRONMENT=local to ignore them."
    )


@final
class SkyPilotEnvironment(NodesEnvironment):
    """The process of a node of a SkyPilot task.

    The address of node 0 is `MASTER_ADDR`, or the first line of `SKYPILOT_NODE_IPS`; the port is
    `MASTER_PORT`, or computed from the task's id. `devices` gives the number of processes on each node.

    Source: https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
    """

    name = "skypilot"
    markers = ("SKYPILOT_NODE_RANK",)
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "SKYPILOT_NODE_RANK",
        "num_nodes": "SKYPILOT_NUM_NODES",
    }
    optional_variables: ClassVar[Mapping[str, str]] = ClusterEnvironment.optional_variables
    required = ("SKYPILOT_NODE_IPS",)
    optional = ("SKYPILOT_NUM_GPUS_PER_NODE",)
    job_variables = ("SKYPILOT_TASK_ID",)

    def _node_names(self) -> list[str]:
        return list(dict.fromkeys(self._text("SKYPILOT_NODE_IPS").split()))

"""Cluster environments: the launcher that started this process, its ranks, and the address of rank 0."""

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.detect import Detection, create_environment, detect_environment
from rankwise.environments.mpi import LSFEnvironment, MPIEnvironment, PALSEnvironment
from rankwise.environments.nodes import (
    KubeflowEnvironment,
    NodesEnvironment,
    SkyPilotEnvironment,
    TrainJobEnvironment,
)
from rankwise.environments.slurm import SlurmEnvironment
from rankwise.environments.torch_variables import LocalEnvironment, PlainEnvironment, TorchElasticEnvironment

__all__ = [
    "ClusterEnvironment",
    "Detection",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LocalEnvironment",
    "MPIEnvironment",
    "NodesEnvironment",
    "PALSEnvironment",
    "PlainEnvironment",
    "SkyPilotEnvironment",
    "SlurmEnvironment",
    "TorchElasticEnvironment",
    "TrainJobEnvironment",
    "create_environment",
    "detect_environment",
]

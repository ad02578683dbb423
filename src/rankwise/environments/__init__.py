"""Cluster environments: the launcher that started this process, its ranks, and the address of rank 0."""

from rankwise.environments.adapted import (
    GivenEnvironment,
    LightningClusterEnvironment,
    adapted_environment,
)
from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.detect import Detection, create_environment, detect_environment
from rankwise.environments.mpi import LSFEnvironment, MPIEnvironment, PALSEnvironment
from rankwise.environments.slurm import SlurmEnvironment
from rankwise.environments.torch_variables import (
    KubeflowEnvironment,
    LocalEnvironment,
    NodesEnvironment,
    PlainEnvironment,
    TorchElasticEnvironment,
)

__all__ = [
    "ClusterEnvironment",
    "Detection",
    "GivenEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningClusterEnvironment",
    "LocalEnvironment",
    "MPIEnvironment",
    "NodesEnvironment",
    "PALSEnvironment",
    "PlainEnvironment",
    "SlurmEnvironment",
    "TorchElasticEnvironment",
    "adapted_environment",
    "create_environment",
    "detect_environment",
]

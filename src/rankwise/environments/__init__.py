"""Cluster environments: the launcher that started this process, its ranks, and the address of rank 0."""

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.detect import Detection, create_environment, detect_environment
from rankwise.environments.kubeflow import KubeflowEnvironment
from rankwise.environments.local import LocalEnvironment
from rankwise.environments.lsf import LSFEnvironment
from rankwise.environments.mpi import MPIEnvironment
from rankwise.environments.pals import PALSEnvironment
from rankwise.environments.plain import NodesEnvironment, PlainEnvironment
from rankwise.environments.slurm import SlurmEnvironment
from rankwise.environments.torchelastic import TorchElasticEnvironment

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
    "SlurmEnvironment",
    "TorchElasticEnvironment",
    "create_environment",
    "detect_environment",
]

"""Names of `lightning.pytorch.plugins` and `lightning.fabric.plugins`, with their subfolders."""

from rankwise.checkpoint import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from rankwise.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    TorchElasticEnvironment,
)
from rankwise.environments import LocalEnvironment as LightningEnvironment
from rankwise.environments import SlurmEnvironment as SLURMEnvironment
from rankwise.lightning._modules import complete_module
from rankwise.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "HalfPrecision",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "MixedPrecision",
    "Precision",
    "SLURMEnvironment",
    "TorchCheckpointIO",
    "TorchElasticEnvironment",
]

__getattr__ = complete_module(__name__)

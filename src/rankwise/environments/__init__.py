"""Cluster environments: who started us, and where is rank 0?"""

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.detect import Detection, create_environment, detect_environment
from rankwise.environments.local import LocalEnvironment
from rankwise.environments.plain import PlainEnvironment
from rankwise.environments.torchelastic import TorchElasticEnvironment

__all__ = [
    "ClusterEnvironment",
    "Detection",
    "LocalEnvironment",
    "PlainEnvironment",
    "TorchElasticEnvironment",
    "create_environment",
    "detect_environment",
]

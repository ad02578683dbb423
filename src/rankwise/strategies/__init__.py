"""Strategies: how training is distributed."""

from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import (
    AutoStrategy,
    DDPElasticStrategy,
    DDPForkStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
)

__all__ = [
    "AutoStrategy",
    "DDPElasticStrategy",
    "DDPForkStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]

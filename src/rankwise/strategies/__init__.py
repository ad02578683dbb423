"""Strategies: how training is distributed."""

from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.variants import (
    AutoStrategy,
    DDPElasticStrategy,
    DDPForkStrategy,
    DDPSpawnStrategy,
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

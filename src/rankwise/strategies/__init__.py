"""Strategies: how training is distributed."""

from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.ddp_elastic import DDPElasticStrategy
from rankwise.strategies.ddp_variants import AutoStrategy, DDPForkStrategy, DDPSpawnStrategy
from rankwise.strategies.single_device import SingleDeviceStrategy

__all__ = [
    "AutoStrategy",
    "DDPElasticStrategy",
    "DDPForkStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]

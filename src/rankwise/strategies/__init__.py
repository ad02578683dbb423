"""Strategies: how training is distributed."""

from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import AutoStrategy, DDPForkStrategy, DDPSpawnStrategy, DDPStrategy
from rankwise.strategies.single_device import SingleDeviceStrategy

__all__ = [
    "AutoStrategy",
    "DDPForkStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]

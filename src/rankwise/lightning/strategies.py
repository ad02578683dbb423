"""Names of `lightning.pytorch.strategies` and `lightning.fabric.strategies`."""

from rankwise.lightning._modules import complete_module
from rankwise.registry import StrategyRegistry
from rankwise.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

STRATEGY_REGISTRY = StrategyRegistry

__all__ = ["STRATEGY_REGISTRY", "DDPStrategy", "SingleDeviceStrategy", "Strategy", "StrategyRegistry"]

__getattr__ = complete_module(__name__)

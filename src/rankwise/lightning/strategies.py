"""Names of `lightning.pytorch.strategies` and `lightning.fabric.strategies`."""

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.registry import StrategyRegistry
from rankwise.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

STRATEGY_REGISTRY = StrategyRegistry

__all__ = ["STRATEGY_REGISTRY", "DDPStrategy", "SingleDeviceStrategy", "Strategy", "StrategyRegistry"]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "ddp", "single_device", "strategy")

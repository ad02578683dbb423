"""`Fabric`: a strategy, a precision and loggers for a training loop that you write."""

from rankwise.fabric.fabric import Fabric
from rankwise.fabric.wrappers import FabricDataLoader, FabricModule, FabricOptimizer

__all__ = ["Fabric", "FabricDataLoader", "FabricModule", "FabricOptimizer"]

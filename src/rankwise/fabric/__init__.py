"""`Fabric`: a strategy, a precision and loggers for a training loop that you write."""

from rankwise.fabric.data_loader import FabricDataLoader
from rankwise.fabric.fabric import Fabric
from rankwise.fabric.module import FabricModule
from rankwise.fabric.optimizer import FabricOptimizer

__all__ = ["Fabric", "FabricDataLoader", "FabricModule", "FabricOptimizer"]

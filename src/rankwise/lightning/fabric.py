"""Names of `lightning.fabric`."""

from rankwise.fabric import Fabric
from rankwise.lightning import loggers, plugins, strategies, utilities
from rankwise.lightning._modules import add_submodules, refuse_missing_names
from rankwise.seed import seed_everything

__all__ = ["Fabric", "loggers", "plugins", "seed_everything", "strategies", "utilities"]

__getattr__ = refuse_missing_names(__name__)
add_submodules(__name__, loggers, plugins, strategies, utilities)

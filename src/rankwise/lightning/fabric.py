"""Names of `lightning.fabric`."""

from rankwise.fabric import Fabric
from rankwise.lightning import loggers, plugins, strategies, utilities
from rankwise.lightning._modules import complete_module, copy_submodules
from rankwise.seed import seed_everything

__all__ = ["Fabric", "loggers", "plugins", "seed_everything", "strategies", "utilities"]

__getattr__ = complete_module(__name__)
copy_submodules(__name__, loggers, plugins, strategies, utilities)

"""Names of `lightning.pytorch.loggers` and `lightning.fabric.loggers`, all in `rankwise.loggers`."""

from rankwise.lightning._modules import complete_module
from rankwise.loggers import *  # noqa: F403  all of its names
from rankwise.loggers import __all__  # noqa: F401  exported

__getattr__ = complete_module(__name__)

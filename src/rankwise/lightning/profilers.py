"""Names of `lightning.pytorch.profilers`, all in `rankwise.profilers`."""

from rankwise.lightning._modules import complete_module
from rankwise.profilers import *  # noqa: F403  all of its names
from rankwise.profilers import __all__  # noqa: F401  exported

__getattr__ = complete_module(__name__)

"""Names of `lightning.pytorch.callbacks`, all in `rankwise.callbacks`."""

from rankwise.callbacks import *  # noqa: F403  all of its names
from rankwise.callbacks import __all__  # noqa: F401  exported
from rankwise.lightning._modules import complete_module

__getattr__ = complete_module(__name__)

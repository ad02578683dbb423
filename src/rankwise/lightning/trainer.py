"""Names of `lightning.pytorch.trainer`."""

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.seed import seed_everything
from rankwise.trainer import Trainer

__all__ = ["Trainer", "seed_everything"]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "trainer")

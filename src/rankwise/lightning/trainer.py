"""Names of `lightning.pytorch.trainer`."""

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.seed import seed_everything
from rankwise.trainer import Trainer
from rankwise.trainer.state import RunningStage, TrainerFn, TrainerStatus

__all__ = ["RunningStage", "Trainer", "TrainerFn", "TrainerStatus", "seed_everything"]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "trainer", "states")

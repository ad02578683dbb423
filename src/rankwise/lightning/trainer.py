"""Names of `lightning.pytorch.trainer`."""

from rankwise.lightning._modules import complete_module
from rankwise.seed import seed_everything
from rankwise.trainer import Trainer
from rankwise.trainer.state import RunningStage, TrainerFn, TrainerStatus

__all__ = ["RunningStage", "Trainer", "TrainerFn", "TrainerStatus", "seed_everything"]

__getattr__ = complete_module(__name__)

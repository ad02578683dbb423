"""Names of `lightning.pytorch.trainer`."""

from enum import Enum

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.seed import seed_everything
from rankwise.trainer import Trainer

__all__ = ["Trainer", "TrainerFn", "TrainerStatus", "seed_everything"]


class TrainerFn(str, Enum):
    """The values of `trainer.state.fn`."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(str, Enum):
    """The values of `trainer.state.status`."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "states", "trainer")

"""Names of `lightning.pytorch.loggers` and `lightning.fabric.loggers`: those of `rankwise.loggers`."""

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.loggers import *  # noqa: F403  all of its names
from rankwise.loggers import __all__  # noqa: F401  exported

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "csv_logs", "logger", "mlflow", "tensorboard", "wandb")

"""Names of `lightning.pytorch.callbacks`: those of `rankwise.callbacks`."""

from rankwise.callbacks import *  # noqa: F403  all of its names
from rankwise.callbacks import __all__  # noqa: F401  exported
from rankwise.lightning._modules import add_other_names, refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
add_other_names(
    __name__,
    "callback",
    "device_stats_monitor",
    "early_stopping",
    "finetuning",
    "gradient_accumulation_scheduler",
    "lambda_function",
    "lr_finder",
    "lr_monitor",
    "model_checkpoint",
    "model_summary",
    "prediction_writer",
    "progress",
    "progress.progress_bar",
    "progress.rich_progress",
    "progress.tqdm_progress",
    "stochastic_weight_avg",
    "throughput_monitor",
    "timer",
    "weight_averaging",
)

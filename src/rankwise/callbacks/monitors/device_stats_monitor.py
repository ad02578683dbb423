"""`DeviceStatsMonitor`: log the use of the device, and of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.callbacks.monitors.base import LoggingCallback
from rankwise.checks import check_installed

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule


@final
class DeviceStatsMonitor(LoggingCallback):
    """Log statistics of global rank 0's device before and after a training batch, every `log_every_n_steps`.

    Names are `DeviceStatsMonitor.on_train_batch_start/<statistic>` and `.on_train_batch_end/...`. Statistics
    of CUDA have the names of `torch.cuda.memory_stats`. Statistics of the CPU are `cpu_percent`,
    `cpu_vm_percent` (memory) and `cpu_swap_percent`, in percent.

    Args:
        cpu_stats: whether to log statistics of the CPU; by default only if training runs on it.

    Raises:
        ConfigurationError: in `fit`, for a Trainer without loggers.
        MissingExtraError: in `fit`, for statistics of the CPU if psutil is not installed.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._is_due = False

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        super().check_stage(trainer, module, stage)
        if stage == "fit" and self._needs_cpu(trainer):
            check_installed("psutil", "stats", "DeviceStatsMonitor on CPUs")

    def _needs_cpu(self, trainer: Trainer) -> bool:
        is_on_cpu = trainer.strategy.root_device.type == "cpu"
        return is_on_cpu if self._cpu_stats is None else self._cpu_stats

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.progress.counted_steps
        is_start = not trainer.progress.window_batches
        if is_start and trainer.is_global_zero:
            self._is_due = bool(trainer.loggers) and (number + 1) % trainer.log_every_n_steps == 0
        if is_start and self._is_due:
            self._log(trainer, "on_train_batch_start", number)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due and not trainer.progress.window_batches:
            self._log(trainer, "on_train_batch_end", trainer.progress.counted_steps - 1)
            self._is_due = False

    def _log(self, trainer: Trainer, moment: str, step: int) -> None:
        device = trainer.strategy.root_device
        found = dict(torch.cuda.memory_stats(device)) if device.type == "cuda" else {}
        if self._needs_cpu(trainer):
            found |= _of_cpu()
        prefix = f"{type(self).__name__}.{moment}/"
        values = {prefix + name: float(value) for name, value in found.items()}
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step)


def _of_cpu() -> dict[str, float]:
    """Return the use of the CPU, memory and swap space of this machine, in percent."""
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }

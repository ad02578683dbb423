"""`ThroughputMonitor`: log batches and samples per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from rankwise.callbacks.monitors.base import LoggingCallback
from rankwise.checks import check_callable, check_minimum

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule


class _Count(NamedTuple):
    """Counts of this rank's work since the loop began."""

    time: float
    batches: int
    samples: int
    lengths: int


@final
class ThroughputMonitor(LoggingCallback):
    """Log global rank 0's throughput in training and validation, over a window of batches.

    Names are `train/device/batches_per_sec`, `train/device/samples_per_sec`, with `length_fn`
    `train/device/items_per_sec`, and the totals `train/time` (seconds), `train/batches`, `train/samples` and
    `train/lengths`; in validation `validate/...`. On several ranks `train/batches_per_sec` and the like are
    global rank 0's numbers, times the number of ranks. A module with `flops_per_batch` gets
    `train/device/flops_per_sec`, and with `available_flops` `train/device/mfu`, the part of these.

    Training is logged when its metrics are (`log_every_n_steps`), validation at its end. The clock is read
    when a batch ends: a CUDA device may then have some of its work to do.

    Args:
        batch_size_fn: returns the number of samples of a batch.
        length_fn: returns the number of items, such as tokens, of all samples of a batch together.
        window_size: number of batches over which the throughput is computed.
        available_flops: what the device can do in a second, in the precision that is used.
        separator: between the parts of a name.

    Raises:
        InvalidTypeError: if `batch_size_fn` is not a function.
        InvalidArgumentError: for a window of less than 2.
        ConfigurationError: in `fit`, for a Trainer without loggers.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        available_flops: float | None = None,
        separator: str = "/",
    ) -> None:
        functions: dict[str, Any] = {"batch_size_fn": batch_size_fn, "length_fn": length_fn or len}
        for name, function in functions.items():
            check_callable(name, function, "a function of a batch")
        check_minimum("window_size", window_size, 2)
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.window_size = window_size
        self.available_flops = available_flops
        self.separator = separator
        self._counts: dict[str, deque[_Count]] = {}
        self._began: dict[str, float] = {}
        self._training_paused = 0.0  # seconds of validations within training

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._begin("train")
        self._training_paused = 0.0

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._begin("validate")

    def _begin(self, phase: str) -> None:
        self._began[phase] = now = time.perf_counter()
        self._counts[phase] = deque([_Count(now, 0, 0, 0)], maxlen=self.window_size)

    @torch.no_grad()
    def _add(self, phase: str, batch: Any) -> None:
        last = self._counts[phase][-1]
        length = 0 if self.length_fn is None else int(self.length_fn(batch))
        now = time.perf_counter() - (self._training_paused if phase == "train" else 0.0)
        count = _Count(
            now, last.batches + 1, last.samples + int(self.batch_size_fn(batch)), last.lengths + length
        )
        self._counts[phase].append(count)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        self._add("train", batch)
        is_window_end = not trainer.progress.window_batches
        if is_window_end and trainer.progress.counted_steps % trainer.log_every_n_steps == 0:
            self._log(trainer, module, "train")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero:
            self._add("validate", batch)

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.is_global_zero and len(self._counts["validate"]) > 1:
            self._log(trainer, module, "validate")
        if trainer.is_fitting:
            self._training_paused += time.perf_counter() - self._began["validate"]

    def _log(self, trainer: Trainer, module: TrainingModule, phase: str) -> None:
        counts = self._counts[phase]
        first, last = counts[0], counts[-1]
        elapsed = max(last.time - first.time, 1e-9)
        rates = {
            "batches_per_sec": (last.batches - first.batches) / elapsed,
            "samples_per_sec": (last.samples - first.samples) / elapsed,
        }
        totals = {"batches": last.batches, "samples": last.samples}
        if self.length_fn is not None:
            rates["items_per_sec"] = (last.lengths - first.lengths) / elapsed
            totals["lengths"] = last.lengths
        if (flops := getattr(module, "flops_per_batch", None)) is not None:
            rates["flops_per_sec"] = rates["batches_per_sec"] * float(flops)
        prefix = f"{phase}{self.separator}"
        device = f"{prefix}device{self.separator}"
        values = {f"{device}{name}": rate for name, rate in rates.items()}
        if "flops_per_sec" in rates and self.available_flops:
            values[f"{device}mfu"] = rates["flops_per_sec"] / self.available_flops
        if trainer.world_size > 1:
            values |= {f"{prefix}{name}": rate * trainer.world_size for name, rate in rates.items()}
        values |= {f"{prefix}{name}": float(total) for name, total in totals.items()}
        values[f"{prefix}time"] = last.time - self._began[phase]
        for logger in trainer.loggers:
            logger.log_metrics(values, max(0, trainer.progress.counted_steps - trainer.is_fitting))

"""Callbacks that log what no module logs: the use of devices, learning rates, throughput."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.callbacks.base import Callback
from rankwise.checks import check_callable, check_choice, check_installed, check_minimum
from rankwise.errors import ConfigurationError
from rankwise.ranks import warn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule

_RATE_NAMES = {"lengths": "items"}  # "lengths" is the total, "items_per_sec" its rate


class LoggingCallback(Callback):
    """Base class of callbacks that log while `fit` runs."""

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers and not trainer.fast_dev_run:
            name = type(self).__name__
            raise ConfigurationError(
                message=f"{name} has no logger to log to.",
                facts="the trainer has no loggers.",
                remedy=f"Trainer(logger=True), or leave out the {name}.",
            )


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
            import psutil

            found |= {
                "cpu_percent": psutil.cpu_percent(),
                "cpu_vm_percent": psutil.virtual_memory().percent,
                "cpu_swap_percent": psutil.swap_memory().percent,
            }
        prefix = f"{type(self).__name__}.{moment}/"
        values = {prefix + name: float(value) for name, value in found.items()}
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step)


@final
@dataclass(eq=False, repr=False)
class LearningRateMonitor(LoggingCallback):
    """Log each parameter group's learning rate as `lr-<optimizer>`, to all loggers, on global rank 0.

    A second optimizer of one class is `lr-Adam-1`; the groups of one optimizer are `lr-Adam/pg1`,
    `lr-Adam/pg2`, or `lr-Adam/<name>` for a group with a key `"name"`. The `"name"` of a scheduler, in
    `configure_optimizers`, replaces `lr-<optimizer>`. `-momentum` and `-weight_decay` follow these names.

    Each step logs the values that it uses, under the number of steps before it, together with the other
    metrics of the step (`log_every_n_steps`).

    Args:
        logging_interval: `"step"` or `"epoch"`; None logs an optimizer when its scheduler steps, and at both
            if it has none.
        log_momentum: log the momentum, or Adam's first beta, too.
        log_weight_decay: log the weight decay too.

    Attributes:
        lrs: all values that were logged, by name; in a run that continues, since it continued.
        last_momentum_values: the last momentum of each group.
        last_weight_decay_values: the last weight decay of each group.

    Raises:
        InvalidArgumentError: for another `logging_interval`.
        ConfigurationError: in `fit`, for a Trainer without loggers, and for two groups of one name.
    """

    logging_interval: str | None = None
    log_momentum: bool = False
    log_weight_decay: bool = False

    def __post_init__(self) -> None:
        choices = (None, "step", "epoch")
        check_choice("logging_interval", self.logging_interval, choices, "'step', 'epoch' or None")
        self._before: tuple[int, dict[str, float]] | None = None  # the step that runs, and its values
        self._begin_run()

    def _begin_run(self) -> None:
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.global_step == 0:  # a new run, perhaps of another module
            self._begin_run()
        self._before = None
        for name, _, _, groups in _named_groups(trainer):
            if twice := [each for each, count in Counter(groups).items() if count > 1]:
                raise ConfigurationError(
                    message=f"LearningRateMonitor cannot tell parameter groups of {name!r} apart.",
                    facts=f"several have the name {twice[0]!r}.",
                    remedy="give the groups of an optimizer different names.",
                )
        has_momentum = [
            not {"momentum", "betas"}.isdisjoint(optimizer.defaults) for optimizer in trainer.optimizers
        ]
        if self.log_momentum and not all(has_momentum) and trainer.is_global_zero:
            warn("LearningRateMonitor(log_momentum=True) logs 0 for the optimizers that have no momentum.")

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        if self.logging_interval != "step":
            self._log(trainer, trainer.progress.counted_steps, self._values(trainer, "epoch"))

    def on_train_batch_start(
        self, trainer: Trainer, module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        if self.logging_interval != "epoch" and not trainer.progress.window_batches:
            self._before = trainer.progress.counted_steps, self._values(trainer, "step")

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        counted = trainer.progress.counted_steps
        has_stepped = self._before is not None and counted > self._before[0]
        if self._before is None or not has_stepped or counted % trainer.log_every_n_steps:
            return
        self._log(trainer, *self._before)
        self._before = None

    def _values(self, trainer: Trainer, interval: str) -> dict[str, float]:
        """Return the values to log, of the optimizers that are due at an interval."""
        values: dict[str, float] = {}
        for _, optimizer, its_interval, names in _named_groups(trainer):
            if self.logging_interval is None and its_interval not in (None, interval):
                continue
            for name, group in zip(names, optimizer.param_groups, strict=True):
                values[name] = float(group["lr"])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    values[f"{name}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values

    def _log(self, trainer: Trainer, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name.endswith("-momentum"):
                self.last_momentum_values[name] = value
            elif name.endswith("-weight_decay"):
                self.last_weight_decay_values[name] = value
            else:
                self.lrs.setdefault(name, []).append(value)
            trainer.callback_metrics[name] = torch.tensor(value, dtype=torch.double)
        for logger in trainer.loggers if values and trainer.is_global_zero else ():
            logger.log_metrics(values, step)


def _named_groups(trainer: Trainer) -> Iterator[tuple[str, Optimizer, str | None, list[str]]]:
    """Yield for each optimizer its name, itself, its scheduler's interval, and the names of its groups.

    Those with a scheduler come first.
    """
    scheduled = [
        (config.scheduler.optimizer, config.interval, config.name) for config in trainer.lr_scheduler_configs
    ]
    known = {id(optimizer) for optimizer, _, _ in scheduled}
    others = [(optimizer, None, None) for optimizer in trainer.optimizers if id(optimizer) not in known]
    counts: Counter[str] = Counter()
    for optimizer, interval, given in [*scheduled, *others]:
        name = given or f"lr-{type(optimizer).__name__}"
        number, counts[name] = counts[name], counts[name] + 1
        name += f"-{number}" if number else ""
        groups = optimizer.param_groups
        endings = [group.get("name") or f"pg{place}" for place, group in enumerate(groups, start=1)]
        has_names = len(groups) > 1 or "name" in groups[0]
        yield name, optimizer, interval, [f"{name}/{ending}" for ending in endings] if has_names else [name]


@final
@dataclass(eq=False, repr=False)
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

    batch_size_fn: Callable[[Any], int]
    length_fn: Callable[[Any], int] | None = None
    _: KW_ONLY
    window_size: int = 100
    available_flops: float | None = None
    separator: str = "/"

    def __post_init__(self) -> None:
        check_callable("batch_size_fn", self.batch_size_fn, "a function of a batch")
        check_callable("length_fn", self.length_fn or len, "a function of a batch")
        check_minimum("window_size", self.window_size, 2)
        self._counts: dict[str, deque[tuple[float, dict[str, int]]]] = {}  # when a batch ended, and totals
        self._began: dict[str, float] = {}
        self._training_paused = 0.0  # seconds of validations within training

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._begin("train")
        self._training_paused = 0.0

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._begin("validate")

    def _begin(self, phase: str) -> None:
        self._began[phase] = now = time.perf_counter()
        self._counts[phase] = deque([(now, {})], maxlen=self.window_size)

    @torch.no_grad()
    def _add(self, phase: str, batch: Any) -> None:
        # First, as it may wait for the GPU: the clock then counts the batch's work.
        lengths = {} if self.length_fn is None else {"lengths": int(self.length_fn(batch))}
        now = time.perf_counter() - (self._training_paused if phase == "train" else 0.0)
        added = {"batches": 1, "samples": int(self.batch_size_fn(batch)), **lengths}
        _, totals = self._counts[phase][-1]
        self._counts[phase].append((now, {name: totals.get(name, 0) + added[name] for name in added}))

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
        (start, before), (end, totals) = self._counts[phase][0], self._counts[phase][-1]
        elapsed = max(end - start, 1e-9)
        rates = {
            f"{_RATE_NAMES.get(name, name)}_per_sec": (total - before.get(name, 0)) / elapsed
            for name, total in totals.items()
        }
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
        values[f"{prefix}time"] = end - self._began[phase]
        for logger in trainer.loggers:
            logger.log_metrics(values, max(0, trainer.progress.counted_steps - trainer.is_fitting))

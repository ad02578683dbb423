"""`LearningRateMonitor`: log the learning rates of all optimizers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.callbacks.monitors.base import LoggingCallback
from rankwise.checks import check_choice
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule


@final
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

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        check_choice("logging_interval", logging_interval, (None, "step", "epoch"), "'step', 'epoch' or None")
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
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
            warnings.warn(
                "LearningRateMonitor(log_momentum=True) logs 0 for the optimizers that have no momentum.",
                stacklevel=2,
            )

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
                    values[f"{name}-momentum"] = float(_momentum(group))
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


def _momentum(group: dict[str, Any]) -> float:
    momentum: float = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    return momentum

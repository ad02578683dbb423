"""Callbacks that stop training on all ranks: when a metric no longer improves, or after a time."""

from __future__ import annotations

import logging
import math
import operator
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from rankwise import ranks
from rankwise.callbacks.base import Callback, MonitoringCallback
from rankwise.checks import check_choice, check_is_a, check_minimum
from rankwise.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

_log = logging.getLogger(__name__)
_LIMITS = ("patience", "min_delta", "check_finite", "stopping_threshold", "divergence_threshold")
_STATE = ("best_score", "wait_count", "stopped_epoch", "stopped_by")
_DURATION = 'a timedelta, "DD:HH:MM:SS", or keywords of timedelta such as {"hours": 3}'


class EarlyStopping(MonitoringCallback):
    """Stop when `monitor` has not improved for `patience` checks in a row.

    If one rank has a reason to stop, all ranks stop after the same step. Resuming from a checkpoint that is
    written afterwards trains no further, unless the limits of this callback have changed.

    Args:
        monitor: name of a logged metric.
        min_delta: smallest difference that counts as an improvement.
        patience: number of checks without improvement after which training stops.
        verbose: log improvements too, not only why training stops.
        mode: `"min"` or `"max"`.
        strict: raise if the metric was not logged; otherwise skip the check.
        check_finite: stop if the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: check after every epoch (True), or after every validation (False); by
            default after every validation, and after every epoch in a fit without validation.
        log_rank_zero_only: log messages on global rank 0 only; otherwise every rank logs its own reason.

    Attributes:
        best_score: the best value so far.
        wait_count: number of checks since then.
        stopped_epoch: the epoch in which training was stopped; 0 before.
        stopped_by: the limits with which it was stopped; None before.

    Raises:
        InvalidArgumentError: if an argument is out of range.
        ConfigurationError: in `fit`, for `check_on_train_epoch_end=False` without validation.
    """

    epoch_end_argument = "check_on_train_epoch_end"

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__(monitor, mode, check_on_train_epoch_end)
        check_minimum("patience", patience, 0)
        check_minimum("min_delta", min_delta, 0)
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.log_rank_zero_only = log_rank_zero_only
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self._begin_run()

    def _begin_run(self) -> None:
        self.best_score = self.worst
        self.wait_count = self.stopped_epoch = 0
        self.stopped_by: tuple[float | None, ...] | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether this callback has stopped training with its present limits, also before a checkpoint."""
        return self.stopped_by == self._limits

    @property
    def _limits(self) -> tuple[float | None, ...]:
        return tuple(getattr(self, name) for name in _LIMITS)

    @property
    def state_key(self) -> str:
        """The class name with metric and mode, so that a trainer can have several."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        float(state_dict["best_score"])  # raises if it is not a number
        self.best_score = state_dict["best_score"]
        self.wait_count = operator.index(state_dict["wait_count"])
        self.stopped_epoch = operator.index(state_dict["stopped_epoch"])
        limits = state_dict["stopped_by"]
        self.stopped_by = None if limits is None else tuple(limits)

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        super().on_train_start(trainer, module)
        if trainer.global_step == 0:  # a new run, perhaps of another module
            self._begin_run()
        if not trainer.should_stop:  # a new fit, not one resumed from a stopped run
            self.stopped_by = None

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Compare the metric with the limits, and stop all ranks if one has a reason to."""
        score = self.monitored_value(trainer)
        if score is None and self.strict:
            raise self.missing_metric(trainer)
        best = self.best_score
        reason = self._reason_to_stop(score)
        if self.verbose and self.best_score != best:
            self._log(trainer, f"{self.monitor} improved from {best:g} to {self.best_score:g}.")
        if trainer.strategy.reduce_boolean_decision(reason is not None, all=False):
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopped_by = self._limits
            self._log(trainer, reason or f"Another rank stops on {self.monitor!r}.")

    def _log(self, trainer: Trainer, text: str) -> None:
        if self.log_rank_zero_only or trainer.world_size == 1:
            ranks.rank_zero_only(_log.info)("EarlyStopping: %s", text)
        else:
            _log.info("EarlyStopping on global_rank %d: %s", trainer.global_rank, text)

    def _reason_to_stop(self, score: float | None) -> str | None:
        if score is None:
            return None
        if self.check_finite and not math.isfinite(score):
            return f"{self.monitor} = {score} is not finite."
        if self.stopping_threshold is not None and self.is_better(score, self.stopping_threshold):
            return f"{self.monitor} = {score:g} is better than {self.stopping_threshold:g}."
        if self.divergence_threshold is not None and self.is_better(self.divergence_threshold, score):
            return f"{self.monitor} = {score:g} is worse than {self.divergence_threshold:g}."
        if self.is_better(score, self.best_score, self.min_delta):
            self.best_score, self.wait_count = score, 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return (
            f"{self.monitor} has not improved {self.wait_count} times; its best value is {self.best_score:g}."
        )


@final
class Timer(Callback):
    """Set `trainer.should_stop` after `duration`, counted over all fits with this callback.

    Each rank reads its own clock. If one rank sets `should_stop`, the trainer stops all ranks after the same
    step.

    Args:
        duration: a `timedelta`, `"DD:HH:MM:SS"` or a mapping such as `{"hours": 3}`; None measures only.
        interval: check after each `"step"` or each `"epoch"`.

    Raises:
        InvalidArgumentError, InvalidTypeError: if the duration or the interval is invalid.
    """

    def __init__(self, duration: Any = None, interval: str = "step") -> None:
        check_choice("interval", interval, ("step", "epoch"))
        self.duration = None if duration is None else parse_duration("max_time", duration)
        self.interval = interval
        self._before = 0.0
        self._started: float | None = None

    @property
    def time_elapsed(self) -> float:
        """Seconds of training so far, including earlier fits."""
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)

    @property
    def time_remaining(self) -> float | None:
        """Seconds until training stops; None without a duration."""
        if self.duration is None:
            return None
        return max(0.0, self.duration.total_seconds() - self.time_elapsed)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": self.time_elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = float(state_dict["time_elapsed"])
        self._started = None

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._started = time.monotonic()
        self._stop_if_due(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.interval == "step":
            self._stop_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if self.interval == "epoch":
            self._stop_if_due(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self._before, self._started = self.time_elapsed, None

    def on_exception(self, trainer: Trainer, module: TrainingModule, exception: BaseException) -> None:
        self.on_train_end(trainer, module)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self.time_remaining == 0.0:
            trainer.should_stop = True


def parse_duration(argument: str, given: Any) -> timedelta:
    """Return a duration; `given` is one, `"DD:HH:MM:SS"`, or a mapping of keywords of `timedelta`.

    Raises:
        InvalidArgumentError, InvalidTypeError: if `given` is not a duration; both name the `argument`.
    """
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", given.strip())
        if match is None:
            raise InvalidArgumentError(argument=argument, value=given, expected=_DURATION)
        days, hours, minutes, seconds = map(int, match.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if isinstance(given, Mapping):
        try:
            given = timedelta(**given)
        except TypeError:
            raise InvalidArgumentError(argument=argument, value=given, expected=_DURATION) from None
    check_is_a(argument, given, timedelta, _DURATION)
    duration: timedelta = given
    check_minimum(argument, duration, timedelta(0), "a duration that is not negative")
    return duration

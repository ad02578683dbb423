"""`EarlyStopping`: end training when a metric no longer improves; all ranks decide together."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks.monitoring import MonitoringCallback
from rankwise.errors import InvalidArgumentError
from rankwise.ranks import rank_zero_only

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

__all__ = ["EarlyStopping"]

_log = logging.getLogger(__name__)


@final
class EarlyStopping(MonitoringCallback):
    """Stop when `monitor` has not improved for `patience` checks in a row.

    The ranks decide together: where one wants to stop, all do, after the same step. A checkpoint from then on
    is one of a run at its end: going on from it trains no further, unless this has other limits by then.

    Args:
        monitor: the logged metric to watch.
        min_delta: by how much a value must be better to count as an improvement.
        patience: how many checks without improvement are accepted.
        mode: `"min"` or `"max"`.
        strict: whether a metric that was not logged is an error, or is waited for.
        check_finite: whether a NaN or infinite metric stops training.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.

    Attributes:
        best_score: the best value so far.
        wait_count: checks since then.
        stopped_epoch: the epoch in which training was stopped; 0 before.

    Raises:
        InvalidArgumentError: for values that cannot work.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        if patience < 0:
            raise InvalidArgumentError(argument="patience", value=patience, expected="0 or more")
        if min_delta < 0:
            raise InvalidArgumentError(argument="min_delta", value=min_delta, expected="0 or more")
        self.min_delta = min_delta
        self.patience = patience
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.best_score = self.worst
        self.wait_count = 0
        self.stopped_epoch = 0
        self._stopped_by: tuple[float | None, ...] | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether training was stopped, maybe before a checkpoint, by the limits that this has."""
        return self._stopped_by == self._limits

    @property
    def _limits(self) -> tuple[float | None, ...]:
        thresholds = self.check_finite, self.stopping_threshold, self.divergence_threshold
        return (self.patience, self.min_delta, *thresholds)

    @property
    def state_key(self) -> str:
        """The class's name with what is watched, so that several can watch."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": self.best_score,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "stopped_by": self._stopped_by,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score = state_dict["best_score"]
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._stopped_by = state_dict["stopped_by"]

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        if not trainer.should_stop:  # nor did a checkpoint set it: a fit after the one that was stopped
            self._stopped_by = None

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Compare, and stop on all ranks if any has a reason."""
        score = self.monitored_value(trainer)
        if score is None and self.strict:
            raise self.missing_metric(trainer)
        reason = self._reason_to_stop(score)
        if trainer.strategy.reduce_boolean_decision(reason is not None, all=False):
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self._stopped_by = self._limits
            _announce(reason or f"Another rank stops on {self.monitor!r}.")

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


@rank_zero_only
def _announce(reason: str) -> None:
    _log.info("EarlyStopping: %s", reason)

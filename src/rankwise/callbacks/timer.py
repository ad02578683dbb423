"""`Timer`: stop training on all ranks after a given time."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks.base import Callback
from rankwise.checks import check_choice, check_is_a, check_minimum
from rankwise.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

_EXPECTED = 'a timedelta, "DD:HH:MM:SS", or keywords of timedelta such as {"hours": 3}'


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
        self._before, self._started = self.time_elapsed, None

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
            raise InvalidArgumentError(argument=argument, value=given, expected=_EXPECTED)
        days, hours, minutes, seconds = map(int, match.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if isinstance(given, Mapping):
        try:
            given = timedelta(**given)
        except TypeError:
            raise InvalidArgumentError(argument=argument, value=given, expected=_EXPECTED) from None
    check_is_a(argument, given, timedelta, _EXPECTED)
    duration: timedelta = given
    check_minimum(argument, duration, timedelta(0), "a duration that is not negative")
    return duration

"""The timer: durations in every form, when it stops training, what it remembers."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rankwise.callbacks import Timer
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, trainer


def test_durations() -> None:
    """Every form that Lightning takes means the same."""
    assert Timer("00:00:00:05").duration == timedelta(seconds=5)
    assert Timer("02:03:04:05").duration == timedelta(days=2, hours=3, minutes=4, seconds=5)
    assert Timer(timedelta(minutes=2)).duration == timedelta(minutes=2)
    assert Timer({"hours": 1, "minutes": 30}).duration == timedelta(minutes=90)
    assert Timer(None).duration is None


def test_what_cannot_be(tmp_path: Path) -> None:
    """A Trainer refuses other durations before anything starts; steps and epochs are all intervals."""
    wrong: list[Any] = ["5 minutes", "00:05:00", {"hour": 1}, timedelta(seconds=-1)]
    for given in wrong:
        raises(InvalidArgumentError, "max_time", trainer, tmp_path, max_time=given)
    raises(InvalidTypeError, "max_time", trainer, tmp_path, max_time=60)
    raises(InvalidArgumentError, "'step' or 'epoch'", Timer, interval="batch")


@pytest.mark.parametrize(("interval", "steps"), [("step", 2), ("epoch", 4)])
def test_stops(tmp_path: Path, interval: str, steps: int) -> None:
    """Training ends after the step, or the epoch, in which time ran out."""
    timer = Timer(timedelta(hours=1), interval)

    class Late(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                timer._before = 3600.0

    train = fitted(tmp_path, Late(), max_epochs=9, callbacks=[timer])
    assert train.global_step == steps
    assert timer.time_remaining == 0.0


def test_max_time(tmp_path: Path) -> None:
    """With no time there is no step, without a limit nothing is stopped; two timers contradict each other."""
    train = trainer(tmp_path, max_time=timedelta(0))
    with pytest.warns(UserWarning, match="Nothing to train"):
        train.fit(Line(), loader())
    assert train.global_step == 0
    timer = Timer()
    train = fitted(tmp_path, callbacks=[timer])
    assert (train.global_step, timer.time_remaining) == (4, None)
    with pytest.raises(ConfigurationError, match="Two callbacks"):
        trainer(tmp_path, max_time={"hours": 1}, callbacks=[Timer()])


def test_fits_add_up(tmp_path: Path) -> None:
    """What a fit has taken counts in the next one, here or from a checkpoint; between them no time passes."""
    timer = Timer({"hours": 1})
    train = fitted(tmp_path, callbacks=[timer])
    first = timer.time_elapsed
    assert 0 < first == timer.time_elapsed < 60
    train.max_epochs = 2
    train.fit(train.module, loader())
    assert timer.time_elapsed > first
    other = Timer({"hours": 1})
    other.load_state_dict(timer.state_dict())
    assert other.time_elapsed == timer.time_elapsed

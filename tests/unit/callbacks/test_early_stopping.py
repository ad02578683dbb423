"""When training stops early."""

import math
from pathlib import Path
from typing import Any

import pytest

from rankwise.callbacks import EarlyStopping, ModelCheckpoint
from rankwise.errors import ConfigurationError, InvalidArgumentError
from tests.helpers.raising import raises
from tests.unit.callbacks.test_model_checkpoint import Scripted
from tests.unit.trainer.helpers import fitted, loader, trainer


def epochs_with(folder: Path, stopping: EarlyStopping, *scores: float, **options: Any) -> int:
    """Return how many epochs run with these scores."""
    options = {"callbacks": stopping, "max_epochs": len(scores), **options}
    return fitted(folder, Scripted(*scores), loader(), loader(), **options).current_epoch


def test_patience(tmp_path: Path) -> None:
    """Training stops after that many epochs without a better value; the trainer's min_epochs come first."""
    stopping = EarlyStopping("score", patience=2)
    assert epochs_with(tmp_path, stopping, 3, 2, 2, 2.5, 1) == 4
    assert (stopping.best_score, stopping.wait_count, stopping.stopped_epoch) == (2, 2, 3)
    assert epochs_with(tmp_path, EarlyStopping("score", patience=0), 1, 2, 3, 4, min_epochs=3) == 3


RUNS: dict[str, tuple[int, dict[str, Any], list[float]]] = {
    "a better value starts the count again": (5, {"patience": 2}, [3, 4, 2, 4, 1]),
    "with mode max, more is better": (4, {"patience": 1, "mode": "max"}, [1, 2, 3, 2, 9]),
    "what is hardly better does not count": (2, {"patience": 1, "min_delta": 0.5}, [3, 2.8, 1]),
    "a NaN stops at once": (2, {}, [1, math.nan, 0.5]),
    "a NaN that may be": (3, {"check_finite": False}, [1, math.nan, 0.5]),
    "good enough": (2, {"stopping_threshold": 0.1}, [1, 0.05, 0.01]),
    "hopelessly bad": (2, {"divergence_threshold": 10}, [1, 20, 1]),
}
"""How many epochs run with these arguments and scores."""


@pytest.mark.parametrize("what", RUNS)
def test_when_it_stops(tmp_path: Path, what: str) -> None:
    """All arguments decide."""
    epochs, options, scores = RUNS[what]
    assert epochs_with(tmp_path, EarlyStopping("score", **options), *scores) == epochs


def saved_stop(folder: Path, *scores: float, **options: Any) -> Path:
    """Train with patience 1, and save with every validation; return the last checkpoint."""
    callbacks = [EarlyStopping("score", patience=1), ModelCheckpoint(folder, "{step}", save_last=True)]
    options = {"callbacks": callbacks, "max_epochs": 9, **options}
    assert fitted(folder, Scripted(*scores), loader(), loader(), **options).should_stop
    return folder / "last.ckpt"


def resumed(path: Path, stopping: EarlyStopping | None, **options: Any) -> list[str]:
    """Go on from a checkpoint; return the steps that ran."""
    model, options = Scripted(*[1.0] * 4), {"callbacks": stopping, "max_epochs": 4, **options}
    fitted(path.parent, model, loader(), loader(), ckpt_path=path, **options)
    return [step for step in model.seen if "train" in step]


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}])
def test_going_on_after_a_stop(options: dict[str, Any], tmp_path: Path) -> None:
    """A run that was stopped, and killed before it ended, ends; within an epoch too."""
    path = saved_stop(tmp_path, 1, 2, 3, **options)
    with pytest.warns(UserWarning, match="Nothing to train.*EarlyStopping"):
        assert resumed(path, EarlyStopping("score", patience=1), **options) == []


def test_asked_to_train_on_after_a_stop(tmp_path: Path) -> None:
    """With more patience a run goes on; so it does with nobody to stop it, of which a warning tells."""
    path = saved_stop(tmp_path, 1, 2, 3)
    assert len(resumed(path, EarlyStopping("score", patience=9))) == 8
    with pytest.warns(UserWarning, match="does not have: EarlyStopping"):
        assert len(resumed(path, None)) == 8


def test_second_fit_after_a_stop(tmp_path: Path) -> None:
    """The next fit of the same trainer goes on, and its checkpoints are of a run that does."""
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    train = trainer(tmp_path, callbacks=[EarlyStopping("score", patience=1), saving], max_epochs=9)
    model = Scripted(1, 2, 1, 1, 1)
    train.fit(model, loader(), loader())
    train.max_steps = train.global_step + 1
    train.fit(model, loader(), loader())
    assert train.global_step == 9
    assert len(resumed(Path(saving.best_model_path), EarlyStopping("score", patience=1))) == 3


def test_another_module_is_another_run(tmp_path: Path) -> None:
    """A trainer that fits a second module compares only that one's values, as does a second trainer."""
    stopping = EarlyStopping("score", patience=2)
    train = trainer(tmp_path, callbacks=stopping, max_epochs=4)
    for scores in ((1, 2, 2, 2), (5, 4, 6, 6)):
        train.fit(Scripted(*scores), loader(), loader())
        assert stopping.best_score == min(scores)
    assert train.current_epoch == 4
    assert epochs_with(tmp_path, stopping, 9, 8, 7) == 3


def test_missing_metric(tmp_path: Path) -> None:
    """It is an error, or is waited for; the nearest is suggested; no validations are an error, too."""
    raises(ConfigurationError, "finds no such metric", epochs_with, tmp_path, EarlyStopping("other"), 1)
    assert epochs_with(tmp_path, EarlyStopping("other", strict=False), 1) == 1
    with pytest.raises(ConfigurationError, match=r"no such metric. Did you mean 'score'\?") as caught:
        epochs_with(tmp_path, EarlyStopping("scroe"), 1)
    assert "logged so far: 'loss', 'score'" in str(caught.value)
    stopping = EarlyStopping("loss", check_on_train_epoch_end=False)
    with pytest.raises(ConfigurationError, match=r"\(check_on_train_epoch_end=False\) would never"):
        fitted(tmp_path, callbacks=stopping)


def test_wrong_values() -> None:
    """They are refused in the constructor; the state brings the best score and the count along."""
    wrong: list[dict[str, Any]] = [{"mode": "best"}, {"patience": -1}, {"min_delta": -0.1}]
    for options in wrong:
        raises(InvalidArgumentError, None, EarlyStopping, "score", **options)
    stopping, resumed = EarlyStopping("score"), EarlyStopping("score")
    stopping.best_score, stopping.wait_count = 0.5, 2
    resumed.load_state_dict(stopping.state_dict())
    assert (resumed.best_score, resumed.wait_count) == (0.5, 2)


@pytest.mark.parametrize(("when", "epochs"), [(None, 4), (False, 4), (True, 3)])
def test_check_on_train_epoch_end(tmp_path: Path, when: bool | None, epochs: int) -> None:
    """It checks after every validation, here of every second epoch, or after every epoch."""
    stopping = EarlyStopping("score", patience=1, strict=False, check_on_train_epoch_end=when)
    options = {"check_val_every_n_epoch": 2}
    assert epochs_with(tmp_path, stopping, 0, 1, 0, 2, 0, 3, **options) == epochs


class Ending(Scripted):
    """Ends its epoch before the third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


@pytest.mark.parametrize(("kind", "max_steps"), [(Scripted, 2), (Ending, -1)])
def test_each_validation_counts_once(tmp_path: Path, kind: type[Scripted], max_steps: int) -> None:
    """Also one after which training, or the epoch, ends."""
    stopping = EarlyStopping("score")
    options = {"callbacks": stopping, "val_check_interval": 2, "max_steps": max_steps}
    fitted(tmp_path, kind(1), loader(), loader(), **options)
    assert (stopping.best_score, stopping.wait_count) == (1, 0)


def test_verbose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Improvements are logged too."""
    with caplog.at_level("INFO", "rankwise"):
        epochs_with(tmp_path, EarlyStopping("score", patience=1, verbose=True), 3, 2, 2)
    assert "EarlyStopping: score improved from 3 to 2." in caplog.messages

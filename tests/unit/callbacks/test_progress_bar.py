"""The progress bar."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from rankwise.callbacks import TQDMProgressBar
from rankwise.errors import InvalidArgumentError, MissingExtraError
from tests.unit.trainer.helpers import Line, loader, trainer


def test_bars_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each epoch and each evaluation has a bar, with its number of batches."""
    train = trainer(tmp_path, callbacks=TQDMProgressBar(leave=True), enable_progress_bar=True, max_epochs=2)
    train.fit(Line(), loader(), loader())
    train.test(dataloaders=loader(6))
    train.predict(dataloaders=loader(6))
    drawn = capsys.readouterr().err
    for text in ("Epoch 0", "Epoch 1", "4/4", "Validation", "Test: 100%", "Prediction: 100%", "3/3"):
        assert text in drawn


def test_it_can_travel(tmp_path: Path) -> None:
    """A bar that has been drawn can be pickled."""
    bar = TQDMProgressBar(leave=True)
    trainer(tmp_path, callbacks=bar, enable_progress_bar=True).fit(Line(), loader())
    assert pickle.loads(pickle.dumps(bar)).leave


def test_without_tqdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tqdm there is no bar by default, and asking for one says what to install."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert trainer(tmp_path, enable_progress_bar=None).callbacks == []
    with pytest.raises(MissingExtraError, match=r'pip install "rankwise\[progress\]"'):
        trainer(tmp_path, enable_progress_bar=True)


def test_refresh_rate() -> None:
    """A bar that never moves is refused."""
    with pytest.raises(InvalidArgumentError, match="refresh_rate=0"):
        TQDMProgressBar(refresh_rate=0)


def test_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bars can leave room for those of other programs; there is no negative room."""
    bar = TQDMProgressBar(process_position=1, refresh_rate=3, leave=True)
    trainer(tmp_path, callbacks=bar, enable_progress_bar=True).fit(Line(), loader())
    drawn = capsys.readouterr().err
    assert "\n\n" in drawn  # two lines down
    assert "Epoch 0: 100%" in drawn
    with pytest.raises(InvalidArgumentError, match="process_position"):
        TQDMProgressBar(process_position=-1)

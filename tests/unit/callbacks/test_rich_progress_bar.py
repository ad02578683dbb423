"""The progress bar of rich."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from rankwise.callbacks import RichProgressBar, RichProgressBarTheme
from rankwise.errors import ConfigurationError, InvalidArgumentError
from tests.unit.trainer.helpers import Line, fitted, loader, trainer

pytest.importorskip("rich", reason="rich is not installed")


class Shown(Line):
    """Shows its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("shown", 0.5, prog_bar=True)
        return self.loss(batch)


def shown(folder: Path, *, is_terminal: bool = True, **options: Any) -> str:
    """Train for two epochs, with validation; return what the terminal, or a file, got."""
    text = io.StringIO()
    console = {"file": text, "force_terminal": is_terminal or None, "width": 120 if is_terminal else 20}
    bar = RichProgressBar(console_kwargs=console, **options)
    fitted(folder, Shown(), loader(), loader(), callbacks=bar, enable_progress_bar=True, max_epochs=2)
    assert bar._display is None  # the terminal is as it was
    pickle.dumps(bar)
    return text.getvalue()


def test_bars(tmp_path: Path) -> None:
    """Epochs, validations, batches and metrics are shown, in the theme's format, batches also in groups."""
    text = shown(tmp_path, leave=True, theme=RichProgressBarTheme(metrics_format=".1e"))
    for part in ("Epoch 0", "Epoch 1", "Validation", "4/4", "shown: 5.0e-01", "it/s"):
        assert part in text
    assert "2/4" in shown(tmp_path)
    text = shown(tmp_path, refresh_rate=3)
    assert "2/4" not in text
    assert "3/4" in text
    assert "4/4" in text


def test_refused(tmp_path: Path) -> None:
    """It contradicts enable_progress_bar=False; the rate is at least 1."""
    with pytest.raises(ConfigurationError, match="a RichProgressBar, but enable_progress_bar=False"):
        trainer(tmp_path, callbacks=RichProgressBar())
    with pytest.raises(InvalidArgumentError):
        RichProgressBar(refresh_rate=0)


def test_a_file_gets_lines(tmp_path: Path) -> None:
    """Where the console is no terminal, a fit of a moment is one line."""
    text = shown(tmp_path, is_terminal=False)
    assert text.startswith("Epoch 1: 4/4 [")
    assert text.endswith("shown=0.5]\n")
    assert text.count("\n") == 1

"""The progress bar: what a terminal shows, and the lines in a file."""

import fcntl
import io
import os
import pickle
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rankwise.callbacks import LambdaCallback, TQDMProgressBar, progress_bar
from rankwise.callbacks.progress_bar import clock
from rankwise.errors import InvalidArgumentError, MissingExtraError
from rankwise.trainer import Trainer
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, loader, trainer


class Terminal(io.StringIO):
    """Keeps what it is sent."""

    @override
    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        """What stands in the lines at the end: what comes after the last return to their start."""
        lines = self.getvalue().split("\n")
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Let stderr be a terminal, for the rest of a test: pytest sets it before."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def with_bar(folder: Path, epochs: int = 1, **options: Any) -> Trainer:
    """Return a trainer with a progress bar."""
    bar = TQDMProgressBar(**options)
    return trainer(folder, callbacks=bar, enable_progress_bar=True, max_epochs=epochs)


def test_bars_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch and evaluation has a bar, with its number of batches, and room for other programs' bars."""
    terminal = terminal_for(monkeypatch)
    train = with_bar(tmp_path, 2, leave=True)
    train.fit(Line(), loader(), loader())
    train.test(dataloaders=loader(6))
    train.predict(dataloaders=loader(6))
    drawn = terminal.getvalue()
    for text in ("Epoch 0", "Epoch 1", "4/4", "Validation", "Test: 100%", "Prediction: 100%", "3/3"):
        assert text in drawn
    terminal = terminal_for(monkeypatch)
    with_bar(tmp_path, process_position=1, refresh_rate=3, leave=True).fit(Line(), loader())
    drawn = terminal.getvalue()
    assert "\n\n" in drawn  # two lines down
    assert "Epoch 0: 100%" in drawn
    raises(InvalidArgumentError, "process_position", TQDMProgressBar, process_position=-1)
    raises(InvalidArgumentError, "refresh_rate=0", TQDMProgressBar, refresh_rate=0)


def test_a_terminal_that_is_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that has begun fills its new width."""
    terminal, pair = terminal_for(monkeypatch), os.openpty()
    monkeypatch.setattr(terminal, "fileno", lambda: pair[1])

    def resize(columns: int) -> None:
        fcntl.ioctl(pair[1], termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    class Resizing(Line):
        def on_train_batch_end(self, *_: Any) -> None:
            resize(81)

    resize(101)
    with_bar(tmp_path).fit(Resizing(), loader())
    assert len(terminal.shown.strip()) == 80
    for descriptor in pair:
        os.close(descriptor)


@pytest.mark.parametrize("leave", [False, True])
def test_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: bool) -> None:
    """The bar of the last epoch, of all with `leave`, and those of other stages."""
    terminal = terminal_for(monkeypatch)
    train = with_bar(tmp_path, 2, leave=leave)
    train.fit(Line(), loader(), loader())
    assert "Epoch 1: 100%" in terminal.shown
    assert ("Epoch 0: 100%" in terminal.shown) == leave
    train.validate(Line(), loader())
    train.test(Line(), loader())
    assert terminal.shown.count("Validation: 100%") == 1  # not that within the fit
    assert "Test: 100%" in terminal.shown


class Breaks(Line):
    """Fails in its second batch."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("shown", 0.5, prog_bar=True)
        if batch_idx == 1 and self.current_epoch == 1:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def test_it_stays_after_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows how far training came."""
    terminal = terminal_for(monkeypatch)
    train = with_bar(tmp_path, 2)
    raises(ValueError, "broken", train.fit, Breaks(), loader())
    assert "Epoch 1:  25%" in terminal.shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stream_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """It does not end the training, and an error of the training is what is raised."""

    class Raises(io.StringIO):
        @override
        def isatty(self) -> bool:
            return is_terminal

        @override
        def write(self, text: str) -> int:
            raise RuntimeError("from the stream")

    monkeypatch.setattr(sys, "stderr", Raises())
    train = with_bar(tmp_path, 2)
    raises(ValueError, "broken", train.fit, Breaks(), loader())
    train.fit(Line(), loader())


def test_a_file_gets_a_line_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fit of a moment is one line, however many epochs it has, without control characters."""
    train = with_bar(tmp_path, 5)
    train.fit(Line(), loader(), loader())
    written = capsys.readouterr().err
    assert written.rstrip("\n").isprintable()
    assert written.count("\n") == 1
    assert written.startswith("Epoch 4: 4/4 [0:00:0")


def test_a_file_gets_lines_in_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line shows the batches, the times and the metrics; only one that is due is written."""
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.0)
    train = with_bar(tmp_path, 2, refresh_rate=3)
    raises(ValueError, "broken", train.fit, Breaks(), loader())
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in lines] == ["Epoch 0: 3/4", "Epoch 0: 4/4", "Epoch 1: 1/4"]
    assert "it/s, shown=0.5]" in lines[0]
    assert [clock(seconds) for seconds in (59.9, 7322, None)] == ["0:00:59", "2:02:02", "-:--:--"]


def test_it_can_travel(tmp_path: Path) -> None:
    """A bar that is being drawn can be pickled, and is as before the fit when it is loaded."""
    bar = TQDMProgressBar(leave=True)
    pickled: list[bytes] = []
    pickling = LambdaCallback(on_after_backward=lambda *_: pickled.append(pickle.dumps(bar)))
    trainer(tmp_path, callbacks=[bar, pickling], enable_progress_bar=True).fit(Line(), loader())
    assert vars(pickle.loads(pickled[-1])) == vars(TQDMProgressBar(leave=True))


def test_without_tqdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tqdm there is no bar by default, and asking for one says what to install."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert trainer(tmp_path, enable_progress_bar=None).callbacks == []
    with pytest.raises(MissingExtraError, match=r'pip install "rankwise\[progress\]"'):
        trainer(tmp_path, enable_progress_bar=True)

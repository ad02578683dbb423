"""`ProgressBar`: a bar, or lines, for each training epoch and each evaluation; `TQDMProgressBar`."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks.base import Callback
from rankwise.checks import check_installed, check_minimum

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

LINE_INTERVAL_S = 10.0
"""The least time between two lines, if the output is not a terminal."""


class ProgressBar(Callback, ABC):
    """Base class: show progress and the metrics that were logged with `prog_bar=True`.

    The bar of the last epoch stays on the screen, as do the bars of other stages. A subclass overrides
    `make_bar`.

    Args:
        refresh_rate: number of batches between updates.
        leave: keep the bar of every epoch.

    Raises:
        InvalidArgumentError: if `refresh_rate` is less than 1.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        check_minimum("refresh_rate", refresh_rate, 1)
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._hidden: dict[int, int] = {}  # batches that a bar does not show yet, by its id
        self._training: Any = None
        self._evaluation: Any = None
        self._line_s: float | None = None  # when the last line was written, or the stage began

    @abstractmethod
    def make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        """Return a bar with tqdm's `update(n)`, `set_postfix(metrics, refresh=False)`, `close()` and `leave`.

        Args:
            title: what stands before it.
            total: the number of batches; None if it is not known.
            leave: keep it on the screen when it is closed; the attribute `leave` may change until then.
        """

    def make_lines(self, title: str, total: int | None, leave: bool, write: Callable[[str], object]) -> Any:
        """Return a bar for an output that cannot move the cursor; `write` gets one line at a time."""
        if self._line_s is None:
            self._line_s = time.monotonic()
        return _Lines(title, total, leave, write, self._take_line)

    def _take_line(self) -> bool:
        """Return whether a line is due, and count it as written if so."""
        now_s = time.monotonic()
        if self._line_s is None or now_s - self._line_s < LINE_INTERVAL_S:
            return False
        self._line_s = now_s
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_training": None, "_evaluation": None, "_hidden": {}, "_line_s": None}

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.progress.is_epoch_begun:  # a run that resumes within an epoch
            self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        _close(self._training)  # and remove it, without `leave`
        title = f"Epoch {trainer.current_epoch}"
        self._training = self._bar(trainer, title, trainer.num_training_batches, self.leave)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._move(self._training, trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self._show(self._training, trainer)

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        _close(self._training, stays=True)

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        title = "Sanity check" if trainer.sanity_checking else "Validation"
        self._evaluation = self._bar(trainer, title, sum(trainer.num_val_batches), not trainer.is_fitting)

    def on_test_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._evaluation = self._bar(trainer, "Test", sum(trainer.num_test_batches), leave=True)

    def on_predict_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._evaluation = self._bar(trainer, "Prediction", sum(trainer.num_predict_batches), leave=True)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: TrainingModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._move(self._evaluation)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self._show(self._evaluation)
        _close(self._evaluation)

    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Close the bars, also after an exception."""
        _close(self._evaluation)
        if id(self._training) in self._hidden:
            self._show(self._training)
        _close(self._training, stays=True)
        self._training = self._evaluation = self._line_s = None
        self._hidden.clear()

    def _bar(self, trainer: Trainer, title: str, total: float, leave: bool) -> Any:
        if not trainer.is_global_zero:
            return None
        return self.make_bar(title, None if total == float("inf") else int(total), leave)

    def _move(self, bar: Any, trainer: Trainer | None = None) -> None:
        if bar is None:
            return
        self._hidden[id(bar)] = self._hidden.get(id(bar), 0) + 1
        if self._hidden[id(bar)] >= self.refresh_rate:
            self._show(bar, trainer)

    def _show(self, bar: Any, trainer: Trainer | None = None) -> None:
        """Show the batches that are hidden, and the trainer's metrics."""
        if bar is None:
            return
        if trainer is not None:
            bar.set_postfix(trainer.progress_bar_metrics, refresh=False)
        bar.update(self._hidden.pop(id(bar), 0))


def _close(bar: Any, *, stays: bool = False) -> None:
    if bar is not None:
        if stays:
            bar.leave = True
        bar.close()


def moves_bars(stream: Any) -> bool:
    """Return whether bars can move in a stream: a terminal, or the output of a notebook's cell."""
    is_cell = type(stream).__module__.partition(".")[0] == "ipykernel"
    return is_cell or bool(getattr(stream, "isatty", bool)())


def is_started_process() -> bool:
    """Return whether multiprocessing has started this process: a notebook's widgets belong to another."""
    return multiprocessing.parent_process() is not None


def clock(seconds: float | None) -> str:
    """Return a time as hours, minutes and seconds; dashes for None."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@final
class _Lines:
    """A bar that is written as lines: one now and then, and one at the end if it stays."""

    def __init__(
        self,
        title: str,
        total: int | None,
        leave: bool,
        write: Callable[[str], object],
        take_line: Callable[[], bool],
    ) -> None:
        self.leave = leave
        self._title, self._total, self._done, self._shown = title, total, 0, -1
        self._write, self._take_line = write, take_line
        self._metrics: Mapping[str, float] = {}
        self._began_s = time.monotonic()
        self._is_open = True

    def update(self, count: int) -> None:
        """Count batches; write a line if one is due."""
        self._done += count
        if self._take_line():
            self._show()

    def set_postfix(self, metrics: Mapping[str, float], refresh: bool = True) -> None:
        """Show these metrics in the next line."""
        self._metrics = metrics

    def close(self) -> None:
        """Write the last line; a second call does nothing."""
        if self._is_open and self.leave and self._shown != self._done:
            self._show()
        self._is_open = False

    def _show(self) -> None:
        self._shown = self._done
        with suppress(Exception):  # the stream may be closed, or the user's own code: training goes on
            self._write(self._line())

    def _line(self) -> str:
        elapsed_s = time.monotonic() - self._began_s
        rate = self._done / elapsed_s if elapsed_s else 0.0
        left_s = (self._total - self._done) / rate if self._total is not None and rate else None
        total = "--" if self._total is None else self._total
        metrics = "".join(f", {name}={value:.3g}" for name, value in self._metrics.items())
        times = f"{clock(elapsed_s)} < {clock(left_s)}, {rate:.2f}it/s"
        return f"{self._title}: {self._done}/{total} [{times}{metrics}]"


@final
class TQDMProgressBar(ProgressBar):
    """Show progress with tqdm, and the metrics that were logged with `prog_bar=True`.

    Where stderr is a file or a pipe, there is a line every ten seconds and one at the end instead.

    Args:
        refresh_rate: number of batches between updates.
        process_position: number of programs that show bars above these in the same terminal.
        leave: keep the bar of every epoch.

    Raises:
        MissingExtraError: if tqdm is not installed.
        InvalidArgumentError: if `refresh_rate` is less than 1, or `process_position` less than 0.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        check_minimum("process_position", process_position, 0)
        self.process_position = process_position
        check_installed("tqdm", "progress", "The progress bar")

    @staticmethod
    def is_available() -> bool:
        """Return whether tqdm is installed, without importing it."""
        return importlib.util.find_spec("tqdm") is not None

    def make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        if not moves_bars(sys.stderr):
            return self.make_lines(title, total, leave, _write_line)
        tqdm: Any = importlib.import_module("tqdm.std" if is_started_process() else "tqdm.auto").tqdm

        class Bar(tqdm):  # type: ignore[misc]  # tqdm may ship no types
            monitor_interval = 0  # tqdm starts no monitor thread
            _metrics: Mapping[str, Any] = {}

            def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **metrics: Any) -> None:
                self._metrics = {**(ordered_dict or {}), **metrics}  # written when the bar is drawn
                if refresh:
                    self.refresh()

            def display(self, *args: Any, **kwargs: Any) -> Any:
                with suppress(Exception):  # of the stream
                    return super().display(*args, **kwargs)

            def close(self) -> None:
                with suppress(Exception):
                    super().close()

            @property
            def format_dict(self) -> Any:
                if self._metrics:
                    super().set_postfix(self._metrics, refresh=False)
                return super().format_dict

        Bar.set_lock(threading.RLock())  # instead of tqdm's lock, which processes share
        place = {"position": 2 * self.process_position} if self.process_position else {}
        return Bar(desc=title, total=total, leave=leave, dynamic_ncols=True, **place)


def _write_line(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

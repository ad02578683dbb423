"""`ProgressBar`: a bar for each training epoch and each evaluation; `TQDMProgressBar`."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks.base import Callback
from rankwise.errors import InvalidArgumentError, MissingExtraError

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule


class ProgressBar(Callback):
    """Base class: show progress and the metrics that were logged with `prog_bar=True`.

    A subclass overrides `make_bar`.

    Args:
        refresh_rate: number of batches between updates.
        leave: keep a finished training bar on the screen.

    Raises:
        InvalidArgumentError: if `refresh_rate` is less than 1.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        if refresh_rate < 1:
            raise InvalidArgumentError(argument="refresh_rate", value=refresh_rate, expected="1 or more")
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._hidden: dict[int, int] = {}  # batches that a bar does not show yet, by its id
        self._training: Any = None
        self._evaluation: Any = None

    def make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        """Return a bar with tqdm's `update(n)`, `set_postfix(metrics, refresh=False)` and `close()`.

        Args:
            title: what stands before it.
            total: the number of batches; None if it is not known.
            leave: keep it on the screen when it is closed.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_training": None, "_evaluation": None, "_hidden": {}}

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        _close(self._training)
        title = f"Epoch {trainer.current_epoch}"
        self._training = self._bar(trainer, title, trainer.num_training_batches, self.leave)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._move(self._training, trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self._show_metrics(self._training, trainer)
        self._show_batches(self._training)

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        _close(self._training)

    def on_validation_start(self, trainer: Trainer, module: TrainingModule) -> None:
        title = "Sanity check" if trainer.sanity_checking else "Validation"
        self._evaluation = self._bar(trainer, title, sum(trainer.num_val_batches), leave=False)

    def on_test_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._evaluation = self._bar(trainer, "Test", sum(trainer.num_test_batches), self.leave)

    def on_predict_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._evaluation = self._bar(trainer, "Prediction", sum(trainer.num_predict_batches), self.leave)

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
        self._show_batches(self._evaluation)
        _close(self._evaluation)

    on_test_end = on_predict_end = on_validation_end

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Close the bars, also after an exception."""
        _close(self._training)
        _close(self._evaluation)
        self._hidden.clear()

    def _bar(self, trainer: Trainer, title: str, total: float, leave: bool) -> Any:
        if not trainer.is_global_zero:
            return None
        return self.make_bar(title, None if total == float("inf") else int(total), leave)

    def _move(self, bar: Any, trainer: Trainer | None = None) -> None:
        if bar is None:
            return
        number = self._hidden.get(id(bar), 0) + 1
        self._hidden[id(bar)] = number
        if number < self.refresh_rate:
            return
        if trainer is not None:
            self._show_metrics(bar, trainer)
        self._show_batches(bar)

    def _show_batches(self, bar: Any) -> None:
        if bar is not None:
            bar.update(self._hidden.pop(id(bar), 0))

    def _show_metrics(self, bar: Any, trainer: Trainer) -> None:
        if bar is not None:
            bar.set_postfix(trainer.progress_bar_metrics, refresh=False)


def _close(bar: Any) -> None:
    if bar is not None:
        bar.close()


@final
class TQDMProgressBar(ProgressBar):
    """Show progress with tqdm, and the metrics that were logged with `prog_bar=True`.

    Args:
        refresh_rate: number of batches between updates.
        process_position: number of programs that show bars above these in the same terminal.
        leave: keep a finished training bar on the screen.

    Raises:
        MissingExtraError: if tqdm is not installed.
        InvalidArgumentError: if `refresh_rate` is less than 1, or `process_position` less than 0.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        if process_position < 0:
            raise InvalidArgumentError(
                argument="process_position", value=process_position, expected="0 or more"
            )
        self.process_position = process_position
        if not self.is_available():
            raise MissingExtraError(package="tqdm", extra="progress", purpose="The progress bar")

    @staticmethod
    def is_available() -> bool:
        """Return whether tqdm is installed, without importing it."""
        return importlib.util.find_spec("tqdm") is not None

    def make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        from tqdm.auto import tqdm

        class Bar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]  # tqdm may ship no types
            monitor_interval = 0  # tqdm starts no monitor thread
            _metrics: Mapping[str, Any] = {}

            def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **metrics: Any) -> None:
                self._metrics = {**(ordered_dict or {}), **metrics}  # written when the bar is drawn
                if refresh:
                    self.refresh()

            @property
            def format_dict(self) -> Any:
                if self._metrics:
                    super().set_postfix(self._metrics, refresh=False)
                return super().format_dict

        Bar.set_lock(threading.RLock())  # instead of tqdm's lock, which processes share
        place = {"position": 2 * self.process_position} if self.process_position else {}
        return Bar(desc=title, total=total, leave=leave, dynamic_ncols=True, **place)

"""`RichProgressBar`: a progress bar in colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks.progress_bar import ProgressBar, clock, is_started_process
from rankwise.checks import check_installed

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

_PLAIN: Mapping[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}  # for a line


@final
@dataclass(frozen=True)
class RichProgressBarTheme:
    """Styles of rich for the parts of a bar, and how metrics are written.

    Attributes:
        description: of the title.
        progress_bar: of the part that is done.
        progress_bar_finished: of a bar that is done.
        progress_bar_pulse: of a bar of unknown length.
        batch_progress: of the number of batches.
        time: of the time so far, and of that left.
        processing_speed: of the batches per second.
        metrics: of the metrics.
        metrics_text_delimiter: between two metrics.
        metrics_format: of their values.
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


@final
class RichProgressBar(ProgressBar):
    """Show progress with rich, and the metrics that were logged with `prog_bar=True`.

    If the console is not a terminal, it prints a line every ten seconds and one at the end instead.

    Args:
        refresh_rate: number of batches between updates.
        leave: keep the bar of every epoch.
        theme: its styles.
        console_kwargs: arguments of `rich.console.Console`.

    Raises:
        MissingExtraError: if rich is not installed.
        InvalidArgumentError: if `refresh_rate` is less than 1.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate, leave)
        check_installed("rich", "rich", "RichProgressBar")
        self.theme = theme
        self.console_kwargs = dict(console_kwargs or {})
        self._display: Any = None  # rich.progress.Progress, which shows all bars
        self._num_open = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_display": None, "_num_open": 0}

    def make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        if self._display is None:
            from rich.console import Console

            elsewhere = {"force_jupyter": False} if is_started_process() else {}
            console = Console(**{**elsewhere, **self.console_kwargs})
            if not (console.is_terminal or console.is_jupyter):
                return self.make_lines(title, total, leave, partial(console.print, **_PLAIN))
            self._display = self._started_display(console)
        self._num_open += 1
        return _Bar(self, self._display, self._display.add_task(title, total=total, metrics=""), leave)

    def teardown(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        """Close the bars, and end the display, so that the terminal is as it was."""
        super().teardown(trainer, module, stage)
        self._end_display()

    def _started_display(self, console: Any) -> Any:
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.text import Text

        theme = self.theme

        class Column(ProgressColumn):
            def __init__(self, style: str, text: Callable[[Any], str]) -> None:
                super().__init__()
                self.style, self.text = style, text

            def render(self, task: Any) -> Text:
                return Text(self.text(task), style=self.style)

        def batches(task: Any) -> str:
            return f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}"

        display = Progress(
            TextColumn("{task.description}", style=theme.description),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            Column(theme.batch_progress, batches),
            Column(theme.time, lambda task: f"{clock(task.elapsed)} < {clock(task.time_remaining)}"),
            Column(theme.processing_speed, lambda task: f"{task.speed or 0.0:.2f}it/s"),
            TextColumn("{task.fields[metrics]}", style=theme.metrics, markup=False),
            auto_refresh=False,  # it starts no thread
            console=console,
        )
        display.start()
        return display

    def bar_closed(self) -> None:
        """End the display when no bar is open, if all bars stay: their lines are the terminal's then."""
        self._num_open -= 1
        if self._num_open == 0 and self.leave:
            self._end_display()

    def _end_display(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display, self._num_open = None, 0


@dataclass(eq=False)
class _Bar:
    """One bar of a display, with tqdm's methods."""

    owner: RichProgressBar
    display: Any
    task: Any
    leave: bool
    is_open: bool = True

    def update(self, count: int) -> None:
        self.display.update(self.task, advance=count)
        self.display.refresh()

    def set_postfix(self, metrics: Mapping[str, float], refresh: bool = True) -> None:
        theme = self.owner.theme
        values = (f"{name}: {value:{theme.metrics_format}}" for name, value in metrics.items())
        text = theme.metrics_text_delimiter.join(values)
        self.display.update(self.task, metrics=text, refresh=refresh)

    def close(self) -> None:
        """Stop the bar's clock, or remove the bar; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        if self.leave:
            self.display.stop_task(self.task)
            self.display.refresh()
        else:
            self.display.remove_task(self.task)
        self.owner.bar_closed()

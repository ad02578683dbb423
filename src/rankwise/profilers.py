"""Profilers: how long the parts of a stage take."""

from __future__ import annotations

import functools
import io
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, final

import torch

from rankwise import ranks
from rankwise.checks import check_choice, check_name, check_overrides, check_value
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.paths import absolute_path

if TYPE_CHECKING:
    from cProfile import Profile

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

P = ParamSpec("P")
T = TypeVar("T")


class Profiler(ABC):
    """Measures named actions of a stage: subclass it, and define `start` and `stop`.

    Each rank has its own; at the end of a stage global rank 0 prints its `summary`.

    Args:
        dirpath: a folder in which each rank writes its summary instead; the Trainer's `log_dir` if only
            `filename` is given.
        filename: a part of the file's name, which is `"<stage>-<filename>-<local rank>.txt"`.
    """

    is_active = True
    _table = ""  # of a profiler that measures by another library

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else absolute_path(dirpath)
        self.filename = filename
        self._stage = ""
        self._local_rank = 0
        self._log_dir = "."

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin to measure an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End the measurement of an action."""

    def summary(self) -> str:
        """Return the measurements as text; "" for none."""
        return self._table and f"Profile of {self._stage}:\n{self._table}"

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called when a stage begins, in the process that runs it."""
        self._stage, self._local_rank, self._log_dir = stage, local_rank or 0, log_dir or "."

    def teardown(self, stage: str | None) -> None:
        """Called when a stage ends, also after an exception."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measure the block: `with self.trainer.profiler.profile("augmentation"): ...`."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def profiled(self, action_name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return `function`, measured in each call."""

        @functools.wraps(function, updated=())
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.profile(action_name):
                return function(*args, **kwargs)

        return measured

    def iterated(self, action_name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, and measure how long each takes to come."""
        iterator, end = iter(items), object()
        while True:
            with self.profile(action_name):
                item = next(iterator, end)
            if item is end:
                return
            yield item  # type: ignore[misc]  # not the end

    def instrument(self, owner: object, **actions: str) -> None:
        """Measure methods of an object, given as `method="action"`."""
        for method, action in actions.items():
            setattr(owner, method, self.profiled(action, getattr(owner, method)))

    def path(self, extension: str) -> Path:
        """Return this rank's file for the stage, in a folder that exists then."""
        folder = Path(self.dirpath or self._log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        parts = [self._stage, self.filename, str(self._local_rank)]
        return folder / ("-".join(filter(None, parts)) + extension)

    def describe(self) -> None:
        """Print the summary on global rank 0, or write it to this rank's file."""
        text = self.summary()
        if text and (self.dirpath or self.filename):
            self.path(".txt").write_text(text + "\n", encoding="utf-8")
        elif text:
            ranks.rank_zero_only(print)(text, flush=True)


@final
class PassThroughProfiler(Profiler):
    """Measures nothing, and costs nothing."""

    is_active = False

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]  # is one, too
        return nullcontext(action_name)

    def profiled(self, action_name: str, function: Callable[P, T]) -> Callable[P, T]:
        return function

    def iterated(self, action_name: str, items: Iterable[T]) -> Iterator[T]:
        return iter(items)

    def instrument(self, owner: object, **actions: str) -> None:
        """Leave the methods as they are."""


class SimpleProfiler(Profiler):
    """Measures the wall-clock time of each action; its summary is a table, the longest in total first.

    Actions contain each other: a batch its forward pass, for example. On CUDA the time of an action is that
    of starting its work, unless it waits for a result.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        extended: whether the table has the number of calls and the share of the stage's time, too.

    Attributes:
        current_actions: when each running action began, in seconds of `time.monotonic`.
        recorded_durations: the seconds that each call of each action of the last stage took.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self._began, self._seconds = time.monotonic(), 0.0

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.current_actions.clear()
        self.recorded_durations.clear()
        self._began, self._seconds = time.monotonic(), 0.0

    def start(self, action_name: str) -> None:
        is_new = action_name not in self.current_actions
        check_value("action_name", action_name, is_new, "an action that does not run already")
        self.current_actions[action_name] = time.monotonic()

    def stop(self, action_name: str) -> None:
        end = time.monotonic()
        check_choice("action_name", action_name, self.current_actions, "an action that was started")
        self.recorded_durations[action_name].append(end - self.current_actions.pop(action_name))

    def teardown(self, stage: str | None) -> None:
        self._seconds = time.monotonic() - self._began

    def summary(self) -> str:
        whole = max(self._seconds or time.monotonic() - self._began, 1e-9)
        totals = {action: sum(durations) for action, durations in self.recorded_durations.items()}
        rows = [("action", "calls", "mean (s)", "total (s)", "share")]
        for action in sorted(totals, key=lambda name: -totals[name]):
            calls, total = len(self.recorded_durations[action]), totals[action]
            share = f"{100 * total / whole:.1f} %"
            rows.append((action, str(calls), f"{total / calls:.5f}", f"{total:.5f}", share))
        if not self.extended:
            rows = [(row[0], *row[2:4]) for row in rows]  # type: ignore[misc]  # shorter, all of them
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([f"Profile of {self._stage}: {whole:.3f} s", *lines])


class AdvancedProfiler(Profiler):
    """Measures the functions of Python that run in a stage, with `cProfile`, which makes them slower.

    Its summary is a table of the functions, those first that took longest in total.
    """

    _profile: Profile | None = None  # within a stage

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        from cProfile import Profile

        super().setup(stage, local_rank, log_dir)
        self._profile = Profile()
        self._profile.enable()

    def start(self, action_name: str) -> None:
        """Do nothing: functions have names of their own."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def teardown(self, stage: str | None) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.disable()  # before the import, which it would measure
            import pstats

            text = io.StringIO()
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative").print_stats()
            self._table = text.getvalue().strip()


_BATCHES = {
    "fit": "run_training_batch",
    "validate": "run_validation_batch",
    "test": "run_test_batch",
    "predict": "run_predict_batch",
}
"""The action that is a step of torch's profiler, in each stage."""


class PyTorchProfiler(Profiler):
    """Measures operators with `torch.profiler.profile`, in which actions have their names.

    By default it skips the first two batches and measures the next three, of training in a fit. Its summary
    is torch's table of operators.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        group_by_input_shapes: whether an operator has a row for each shape of its inputs.
        export_to_chrome: whether each rank writes a trace, too, `"...pt.trace.json"` beside its summary, if
            `dirpath` or `filename` is given.
        row_limit: how many rows the table has.
        sort_by_key: the column by which the table is sorted; by default the time on the device.
        profiler_kwargs: other arguments of `torch.profiler.profile`, such as `schedule` (None for all
            batches), `activities`, `profile_memory` and `with_stack`.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self.group_by_input_shapes = group_by_input_shapes
        self.export_to_chrome, self.row_limit, self.sort_by_key = export_to_chrome, row_limit, sort_by_key
        self.profiler_kwargs = profiler_kwargs
        self.profiler: Any = None  # within a stage
        self._ranges: dict[str, list[AbstractContextManager[Any]]] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._table = ""
        own: dict[str, Any] = {"record_shapes": self.group_by_input_shapes, **self.profiler_kwargs}
        # skips wait + warmup = 2 batches
        own.setdefault("schedule", torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1))
        on_ready = own.pop("on_trace_ready", None)
        self.profiler = torch.profiler.profile(**own, on_trace_ready=lambda done: self._keep(done, on_ready))
        self.profiler.__enter__()

    def _keep(self, done: Any, on_ready: Any) -> None:
        """Keep the table of the batches that were measured, and write their trace."""
        averages = done.key_averages(group_by_input_shape=self.group_by_input_shapes)
        key = self.sort_by_key or f"{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        self._table = averages.table(sort_by=key, row_limit=self.row_limit)
        if self.export_to_chrome and (self.dirpath or self.filename):
            done.export_chrome_trace(str(self.path(".pt.trace.json")))
        if on_ready is not None:
            on_ready(done)

    def start(self, action_name: str) -> None:
        if self.profiler is not None:
            running = torch.profiler.record_function(action_name)
            running.__enter__()
            self._ranges.setdefault(action_name, []).append(running)

    def stop(self, action_name: str) -> None:
        if self._ranges.get(action_name):
            self._ranges[action_name].pop().__exit__(None, None, None)
        if self.profiler is not None and action_name == _BATCHES.get(self._stage):
            self.profiler.step()

    def teardown(self, stage: str | None) -> None:
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.__exit__(None, None, None)
        self._ranges.clear()

    def summary(self) -> str:
        none = f"Profile of {self._stage}: no batch was measured; there were too few for the schedule."
        return super().summary() or none

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiler": None, "_ranges": {}}


_CLASSES: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def create_profiler(given: Any) -> Profiler:
    """Return the profiler of a name, the given one, or for None one that measures nothing.

    Raises:
        UnknownNameError: for another name.
        InvalidTypeError: for other values.
        ConfigurationError: for a method of a user's class that would never be called.
    """
    if given is None:
        return PassThroughProfiler()
    if isinstance(given, Profiler):
        check_overrides(given, MISSING_HOOKS["profiler"])
        return given
    expected = f"an instance of Profiler, or one of {', '.join(map(repr, _CLASSES))}"
    return _CLASSES[check_name("profiler", given, tuple(_CLASSES), expected)]()

"""`Profiler`, the base class of profilers; one that measures nothing, and one that measures each action."""

from __future__ import annotations

import functools
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import ParamSpec, TypeVar, final

from rankwise import ranks
from rankwise.checks import check_choice
from rankwise.errors import InvalidArgumentError
from rankwise.paths import absolute_path

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
        return ""

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
            object.__setattr__(owner, method, self.profiled(action, getattr(owner, method)))

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
        if action_name in self.current_actions:
            expected = "an action that does not run already"
            raise InvalidArgumentError(argument="action_name", value=action_name, expected=expected)
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

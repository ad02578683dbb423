"""`SimpleProfiler`: how often each action ran, and how long."""

from __future__ import annotations

import os
import time
from collections import defaultdict

from rankwise.checks import check_choice
from rankwise.errors import InvalidArgumentError
from rankwise.profilers.base import Profiler


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

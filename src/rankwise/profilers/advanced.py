"""`AdvancedProfiler`: the functions that each action calls, measured by `cProfile`."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import re
from collections import defaultdict
from typing import Any

from rankwise.errors import InvalidArgumentError
from rankwise.profilers.base import Profiler


class AdvancedProfiler(Profiler):
    """Measures the functions of Python that run in each action, with `cProfile`, which makes them slower.

    Its summary is a table for each action, of the functions that took longest in total first. Where actions
    contain each other, as a batch its steps, a function counts for the innermost.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        line_count_restriction: how many functions (int), or which fraction of them (float), a table has.
        dump_stats: whether each rank writes a file for each action, too, `"...-<action>.prof"` beside its
            summary, which `pstats` and other programs read.

    Attributes:
        profiled_actions: the profile of each action of the last stage, in the process that ran it.

    Raises:
        InvalidArgumentError: if `line_count_restriction` is out of range.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        is_number = isinstance(line_count_restriction, int)
        if not 0 <= line_count_restriction <= (float("inf") if is_number else 1.0):
            raise InvalidArgumentError(
                argument="line_count_restriction",
                value=line_count_restriction,
                expected="a number of functions (int), or a fraction of them from 0.0 to 1.0",
            )
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = defaultdict(cProfile.Profile)
        self._running: list[str] = []
        self._tables: dict[str, str] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.profiled_actions.clear()
        self._running.clear()

    def start(self, action_name: str) -> None:
        if action_name in self._running:
            expected = "an action that does not run already"
            raise InvalidArgumentError(argument="action_name", value=action_name, expected=expected)
        if self._running:  # only one profile at a time can measure
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions[action_name].enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            expected = "an action that was started"
            raise InvalidArgumentError(argument="action_name", value=action_name, expected=expected)
        self.profiled_actions[self._running[-1]].disable()
        self._running.remove(action_name)
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def teardown(self, stage: str | None) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
            self._running.clear()
        self._tables = {action: self._table_of(profile) for action, profile in self.profiled_actions.items()}

    def _table_of(self, profile: cProfile.Profile) -> str:
        text = io.StringIO()
        stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative")
        stats.print_stats(self.line_count_restriction)
        return text.getvalue().strip()

    def summary(self) -> str:
        tables = [f"Functions in {action}:\n{table}" for action, table in self._tables.items()]
        return "\n\n".join([f"Profile of {self._stage}:", *tables]) if tables else ""

    def describe(self) -> None:
        for action, profile in self.profiled_actions.items() if self.dump_stats else ():
            name = re.sub(r"[^\w.-]+", "_", action)
            profile.dump_stats(self.path(f"-{name}.prof"))
        super().describe()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiled_actions": defaultdict(cProfile.Profile), "_running": []}

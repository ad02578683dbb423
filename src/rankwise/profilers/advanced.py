"""`AdvancedProfiler`: the functions that a stage calls, measured by `cProfile`."""

from __future__ import annotations

import cProfile
import io
import pstats

from rankwise.profilers.base import Profiler


class AdvancedProfiler(Profiler):
    """Measures the functions of Python that run in a stage, with `cProfile`, which makes them slower.

    Its summary is a table of the functions, those first that took longest in total.
    """

    _profile: cProfile.Profile | None = None  # within a stage
    _table = ""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._profile = cProfile.Profile()
        self._profile.enable()

    def start(self, action_name: str) -> None:
        """Do nothing: functions have names of their own."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def teardown(self, stage: str | None) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            text = io.StringIO()
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative").print_stats()
            self._table = text.getvalue().strip()

    def summary(self) -> str:
        return self._table and f"Profile of {self._stage}:\n{self._table}"

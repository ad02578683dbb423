"""`PyTorchProfiler`: the operators of some batches, measured by `torch.profiler`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from rankwise.profilers.base import Profiler

_SKIPPED, _MEASURED = 2, 3
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
        self._table = ""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._table = ""
        own = {"record_shapes": self.group_by_input_shapes, **self.profiler_kwargs}
        if "schedule" not in own:
            own["schedule"] = torch.profiler.schedule(wait=1, warmup=_SKIPPED - 1, active=_MEASURED, repeat=1)
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
        if not self._table:
            return f"Profile of {self._stage}: no batch was measured; there were too few for the schedule."
        return f"Profile of {self._stage}:\n{self._table}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiler": None, "_ranges": {}}

"""`CSVLogger`: metrics in a CSV file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rankwise.checks import check_minimum
from rankwise.loggers.base import RunFolderLogger, rank_zero_experiment
from rankwise.loggers.values import HyperParameters, nested_parameters, numbers
from rankwise.ranks import rank_zero_only

_METRICS = "metrics.csv"


@final
@dataclass(frozen=True)
class CSVExperiment:
    """The writer of the run's files, with Lightning's method names; `CSVLogger.experiment` returns it."""

    _logger: CSVLogger

    @property
    def log_dir(self) -> str:
        """The folder of the run."""
        return self._logger.log_dir

    @property
    def metrics_file_path(self) -> str:
        """The file of the metrics."""
        return str(Path(self.log_dir) / _METRICS)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The lines that are not in the file yet."""
        return self._logger.unsaved

    def log_metrics(self, metrics_dict: Mapping[str, float], step: int | None = None) -> None:
        """Add a line."""
        self._logger.log_metrics(metrics_dict, step)

    def log_hparams(self, params: HyperParameters) -> None:
        """Write the hyper parameters."""
        self._logger.log_hyperparams(params)

    def save(self) -> None:
        """Write the lines that are not in the file yet."""
        self._logger.save()


@final
class CSVLogger(RunFolderLogger):
    """Write `metrics.csv`, one line per logged step, into `save_dir/name/version_<n>`.

    Args:
        save_dir: the parent folder of all runs.
        name: the folder in `save_dir` for these runs; None or "" for `save_dir` itself.
        version: number, or folder name, of the run; by default the first unused number.
        prefix: put before the names of metrics, with a hyphen.
        flush_logs_every_n_steps: number of lines that are buffered before they are written.

    Raises:
        InvalidArgumentError: if `flush_logs_every_n_steps` is less than 1.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "rankwise_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        check_minimum("flush_logs_every_n_steps", flush_logs_every_n_steps, 1)
        self._flush_every = flush_logs_every_n_steps
        self._lines: list[dict[str, float]] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> CSVExperiment:
        """An object with Lightning's methods that writes into this run's files."""
        return CSVExperiment(self)

    @property
    def unsaved(self) -> list[dict[str, float]]:
        """The lines that are not in the file yet."""
        return self._lines

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a line; a new metric adds a column."""
        line = numbers(metrics, self._prefix)
        self._lines.append({**line, **({} if step is None else {"step": step})})
        if len(self._lines) >= self._flush_every:
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: HyperParameters) -> None:
        """Write `hparams.json`."""
        text = json.dumps(nested_parameters(params), indent=2)
        self._file("hparams.json").write_text(f"{text}\n")

    @rank_zero_only
    def save(self) -> None:
        """Append the buffered lines, or rewrite the file if there are new columns."""
        if not self._lines:
            return
        path = self._file(_METRICS)
        path.touch()
        with path.open("r+", newline="") as file:
            reader = csv.DictReader(file)
            known = list(reader.fieldnames or ())
            names = list(dict.fromkeys([*known, *(name for line in self._lines for name in line)]))
            earlier = [] if names == known else list(reader)
            file.seek(0, os.SEEK_END if names == known else os.SEEK_SET)
            writer = csv.DictWriter(file, names)
            if names != known:
                writer.writeheader()
            writer.writerows([*earlier, *self._lines])
            file.truncate()  # another program may have saved the earlier lines in a longer form
        self._lines.clear()

    def _file(self, name: str) -> Path:
        folder = Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

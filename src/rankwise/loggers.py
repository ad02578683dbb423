"""Loggers record the metrics of a trainer: `Logger`, their base class, and `CSVLogger`."""

from __future__ import annotations

import csv
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from rankwise.errors import InvalidArgumentError
from rankwise.paths import absolute_path

__all__ = ["CSVLogger", "Logger"]


class Logger(ABC):
    """Base class of loggers, which record metrics.

    Metrics are logged on global rank 0 only. Its `state_dict` is loaded on the other ranks and in the calling
    process, so that version and folder are equal everywhere.
    """

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, or None if the logger writes no files."""
        return None

    @property
    def log_dirs(self) -> list[str]:
        """The folders of this run and, if each run has a folder of its own, of earlier runs."""
        return [] if self.log_dir is None else [self.log_dir]

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics of the optimizer step `step`; called on global rank 0 only."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the hyper parameters of a run; called on global rank 0 only."""

    def save(self) -> None:
        """Write buffered metrics; called on global rank 0 only."""

    def finalize(self, status: str) -> None:
        """End a stage; `status` is `"success"` or `"failed"`. Called on global rank 0 only."""
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return what other processes need, such as the version."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned in another process."""


@final
class CSVLogger(Logger):
    """Write `metrics.csv`, one line per logged step, into `save_dir/name/version_<n>`.

    Args:
        save_dir: the parent folder of all runs.
        name: the folder in `save_dir` for these runs.
        version: number, or folder name, of the run; by default the first unused number.
        flush_logs_every_n_steps: number of lines that are buffered before they are written.

    Raises:
        InvalidArgumentError: if `flush_logs_every_n_steps` is less than 1.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str = "rankwise_logs",
        version: int | str | None = None,
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise InvalidArgumentError(
                argument="flush_logs_every_n_steps", value=flush_logs_every_n_steps, expected="1 or more"
            )
        self.name = name
        self._root = Path(absolute_path(save_dir)) / name
        self._version = version
        self._is_version_given = version is not None
        self._flush_every = flush_logs_every_n_steps
        self._lines: list[dict[str, float]] = []

    @property
    def version(self) -> int | str:
        """The run's number or name; by default the first number that is unused at the first access."""
        if self._version is None:
            taken = [path.name.removeprefix("version_") for path in self._root.glob("version_*")]
            self._version = 1 + max((int(number) for number in taken if number.isdigit()), default=-1)
        return self._version

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        version = self.version
        return str(self._root / (version if isinstance(version, str) else f"version_{version}"))

    @property
    def log_dirs(self) -> list[str]:
        """The folders of all runs, or of this run only if `version` was given."""
        if self._is_version_given:
            return [self.log_dir]
        return [str(path) for path in self._root.glob("version_*")]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a line; a new metric adds a column."""
        self._lines.append({**metrics, **({} if step is None else {"step": step})})
        if len(self._lines) >= self._flush_every:
            self.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write `hparams.json`."""
        path = self._file("hparams.json")
        path.write_text(json.dumps(dict(params), indent=2, default=str) + "\n")

    def save(self) -> None:
        """Append the buffered lines, or rewrite the file if there are new columns."""
        if not self._lines:
            return
        path = self._file("metrics.csv")
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

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._version = state_dict["version"]

    def _file(self, name: str) -> Path:
        folder = Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

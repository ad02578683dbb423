"""`RunFolderLogger`: base class of loggers that write into `save_dir/name/version_<n>`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rankwise.loggers.base import Logger
from rankwise.paths import absolute_path


class RunFolderLogger(Logger):
    """Base class of loggers that write files into a folder of each run.

    Args:
        save_dir: the parent folder of all runs.
        name: the folder in `save_dir` for these runs; None or "" for `save_dir` itself.
        version: number, or folder name, of the run; by default the first unused number.
        prefix: put before the names of metrics, with a hyphen.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "rankwise_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self._save_dir = absolute_path(save_dir)
        self._name = name or ""
        self._version = version
        self._is_version_given = version is not None
        self._prefix = prefix

    @property
    def name(self) -> str:
        """The folder in `save_dir`."""
        return self._name

    @property
    def save_dir(self) -> str:
        """The parent folder of all runs."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """The parent folder of the runs of this name."""
        return str(Path(self._save_dir) / self._name)

    @property
    def version(self) -> int | str:
        """The run's number or name; by default the first number that is unused at the first access."""
        if self._version is None:
            taken = [path.name.removeprefix("version_") for path in self._run_folders()]
            self._version = 1 + max((int(number) for number in taken if number.isdigit()), default=-1)
        return self._version

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return str(self._folder_of(self.version))

    @property
    def log_dirs(self) -> list[str]:
        """The folders of all runs, or of this run only if `version` was given."""
        if self._is_version_given:
            return [self.log_dir]
        return [str(path) for path in self._run_folders()]

    def _run_folders(self) -> list[Path]:
        return list(Path(self.root_dir).glob("version_*"))

    def _folder_of(self, version: int | str) -> Path:
        return Path(self.root_dir) / (version if isinstance(version, str) else f"version_{version}")

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._version = state_dict["version"]

"""Loggers that write files into a folder of each run: `CSVLogger` and `TensorBoardLogger`."""

from __future__ import annotations

import csv
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from rankwise.checks import check_installed, check_minimum
from rankwise.loggers.base import Logger, rank_zero_experiment
from rankwise.loggers.values import HyperParameters, flat_parameters, image_array, nested_parameters, numbers
from rankwise.nested import to_device
from rankwise.paths import absolute_path
from rankwise.ranks import rank_zero_only, warn

_METRICS = "metrics.csv"


class RunFolderLogger(Logger):
    """Base class of loggers that write files into a folder of each run. See `CSVLogger` for the arguments."""

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
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
        folder = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(Path(self.root_dir) / folder)

    @property
    def log_dirs(self) -> list[str]:
        """The folders of all runs, or of this run only if `version` was given."""
        if self._is_version_given:
            return [self.log_dir]
        return [str(path) for path in self._run_folders()]

    def _run_folders(self) -> list[Path]:
        return list(Path(self.root_dir).glob("version_*"))

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._version = state_dict["version"]


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


@final
class TensorBoardLogger(RunFolderLogger):
    """Write event files into `save_dir/name/version_<n>`, by `torch.utils.tensorboard.SummaryWriter`.

    Args:
        save_dir: the parent folder of all runs.
        name: the folder in `save_dir` for these runs; None or "" for `save_dir` itself.
        version: number, or folder name, of the run; by default the first unused number.
        log_graph: whether to write the module's graph when `fit` begins; the module needs
            `example_input_array`, the arguments of its `forward`.
        default_hp_metric: whether hyper parameters that come without metrics are written with the metric
            `hp_metric` of -1, which TensorBoard needs to list them; log another value under that name.
        prefix: put before the names of metrics, with a hyphen.
        sub_dir: a folder in the run's folder for the event files.
        writer_options: keywords of `SummaryWriter`, such as `flush_secs`.

    Raises:
        MissingExtraError: if tensorboard is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "rankwise_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **writer_options: Any,
    ) -> None:
        check_installed("tensorboard", "tensorboard", "TensorBoardLogger")
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._options = writer_options
        self._writer: Any = None
        self._writer_pid = 0  # a forked process needs a writer, and a file, of its own

    @property
    def log_dir(self) -> str:
        """The folder of the event files."""
        return str(Path(super().log_dir) / (self._sub_dir or ""))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `SummaryWriter`; on ranks other than 0 an object whose methods do nothing."""
        if self._writer is None or self._writer_pid != os.getpid():
            from torch.utils.tensorboard import SummaryWriter

            self._writer, self._writer_pid = SummaryWriter(self.log_dir, **self._options), os.getpid()
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write and flush metrics; the value of one may be a mapping of several curves in one plot."""
        self._write(numbers(metrics, self._prefix), step)
        self.save()

    def _write(self, values: Mapping[str, Any], step: int | None) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.experiment.add_scalars(name, value, step)
            else:
                self.experiment.add_scalar(name, value, step)

    @rank_zero_only
    def log_hyperparams(self, params: HyperParameters, metrics: Mapping[str, Any] | None = None) -> None:
        """Write hyper parameters, nested names joined by "/", with the metrics that judge them."""
        from torch.utils.tensorboard.summary import hparams

        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        values = numbers(metrics, self._prefix)
        self._write(values, 0)
        flat = {name: "None" if value is None else value for name, value in flat_parameters(params).items()}
        for summary in hparams(flat, values):
            self.experiment.file_writer.add_summary(summary)
        self.save()

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None) -> None:
        """Write images as `key/0`, `key/1` and so on; see `image_array` for their types."""
        for number, image in enumerate(images):
            array = image_array(image)
            formats = "HW" if array.ndim == 2 else "HWC"
            self.experiment.add_image(f"{key}/{number}", array, step, dataformats=formats)

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Write the graph of a module's `forward`, if the constructor had `log_graph=True`.

        The graph is recorded in a call with `input_array`, or with the module's `example_input_array`: a
        tensor, or a tuple of arguments. Warns if there is neither.
        """
        if not self._log_graph:
            return
        inputs = getattr(model, "example_input_array", None) if input_array is None else input_array
        if inputs is None:
            warn(
                f"TensorBoardLogger(log_graph=True) writes no graph: {type(model).__name__} has no "
                "example_input_array. Set self.example_input_array to the arguments of its forward().",
            )
            return
        device = next((parameter.device for parameter in model.parameters()), "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of while it traces a module
            self.experiment.add_graph(model, to_device(inputs, device))
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Flush the event file."""
        if self._writer is not None and self._writer_pid == os.getpid():
            self._writer.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the event file; later values go to another one in the same folder."""
        if self._writer is not None and self._writer_pid == os.getpid():
            self._writer.close()
        self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the writer, which belongs to this process."""
        return {**self.__dict__, "_writer": None}

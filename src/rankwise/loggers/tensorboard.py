"""`TensorBoardLogger`: metrics, hyper parameters, images and graphs in event files for TensorBoard."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import nn

from rankwise.checks import check_installed
from rankwise.loggers.base import RunFolderLogger, rank_zero_experiment
from rankwise.loggers.values import HyperParameters, flat_parameters, image_array, numbers
from rankwise.nested import to_device
from rankwise.ranks import rank_zero_only, warn


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
        for summary in hparams(_without_none(flat_parameters(params)), values):
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


def _without_none(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "None" if value is None else value for name, value in params.items()}

"""`WandbLogger`: metrics, hyper parameters and media in a run of Weights & Biases."""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import secrets
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import nn

from rankwise.checks import check_installed
from rankwise.errors import ConfigurationError
from rankwise.loggers.base import Logger, rank_zero_experiment
from rankwise.loggers.values import HyperParameters, nested_parameters, numbers
from rankwise.paths import absolute_path
from rankwise.ranks import rank_zero_only

_STEP = "trainer/global_step"
_TEMPORARY_FOLDERS = (
    ("wandb.sdk.data_types._private", "MEDIA_TMP"),
    ("wandb.sdk.artifacts.artifact", "Artifact._TMP_DIR"),
)
_ID_CHARACTERS = string.ascii_lowercase + string.digits


@final
class WandbLogger(Logger):
    """Log to a run of Weights & Biases, which begins when something is first logged.

    A run that is in progress in this program (`wandb.run`) is used, unless `version` names another one.
    After a failure the run is finished with exit code 1. After a success it continues until the program ends,
    or until `wandb.finish()`; in a worker process it is finished there, and a later stage resumes it.

    Args:
        name: the name of the run on the web page.
        save_dir: the folder in which W&B makes its folder `wandb`.
        version: the run's id, also of a run to resume; by default a random one.
        offline: only write files, for `wandb sync`; open no connection to the servers of W&B.
        dir: the same as `save_dir`, which it replaces.
        id: the same as `version`.
        project: the name of the project; by default `WANDB_PROJECT`, or `rankwise_logs`.
        log_model: only False is accepted: checkpoints are not uploaded.
        experiment: a run that `wandb.init` has returned, to log to.
        prefix: put before the names of metrics and media, with a hyphen.
        init_options: keywords of `wandb.init`, such as `entity`, `group`, `tags` and `notes`.

    Raises:
        MissingExtraError: if wandb is not installed.
        ConfigurationError: for arguments that contradict each other, and for `log_model`.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,  # noqa: A002  the name that wandb.init has
        id: str | None = None,  # noqa: A002  the name that wandb.init has
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        **init_options: Any,
    ) -> None:
        check_installed("wandb", "wandb", "WandbLogger")
        _check_arguments(version, id, init_options, offline=offline, log_model=log_model)
        self._save_dir = absolute_path(save_dir if dir is None else dir)
        self._project = project or os.environ.get("WANDB_PROJECT", "rankwise_logs")
        self._id = version or id
        self._prefix = prefix
        self._options = {"name": name, "resume": "allow", **init_options}
        if offline:
            self._options["mode"] = "offline"
        self._run: Any = None  # picklable: W&B connects a copy in another process to the same run
        self._run_pid = 0  # of the process that finishes the run; 0 for a run of the user's
        if experiment is not None:
            self._use(experiment)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run, of the type `wandb.Run`; on ranks other than 0 an object whose methods do nothing."""
        if self._run is None:
            self._use(_run_in_progress(self._id) or self._begin())
        return self._run

    def _use(self, run: Any) -> None:
        self._run, self._id, self._project = run, run.id, run.project
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)

    def _begin(self) -> Any:
        import wandb

        Path(self._save_dir).mkdir(parents=True, exist_ok=True)
        for folder in _temporary_folders():
            Path(folder.name).mkdir(exist_ok=True)  # an earlier stage of this worker may have removed it
        self._run_pid = os.getpid()
        # While another run is in progress, wandb.init would return that one.
        reinit = {} if wandb.run is None else {"reinit": "create_new"}
        given = {"dir": self._save_dir, "project": self._project, "id": self.version, **reinit}
        return wandb.init(**{**given, **self._options})

    @property
    def name(self) -> str:
        """The name of the project."""
        return self._project

    @property
    def version(self) -> str:
        """The run's id."""
        if self._id is None:
            running = _run_in_progress(None)
            random = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(8))  # as W&B makes them
            self._id = random if running is None else running.id
        return self._id

    @property
    def save_dir(self) -> str:
        """The folder in which W&B makes its folder `wandb`."""
        return self._save_dir

    @property
    def log_dir(self) -> str:
        """The folder for other files of this run, such as checkpoints: `save_dir/project/id`."""
        return str(Path(self._save_dir) / self.name / self.version)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics; the optimizer step is the metric `trainer/global_step`, the x-axis of all others."""
        self._log(numbers(metrics, self._prefix), step)

    def _log(self, values: dict[str, Any], step: int | None) -> None:
        self.experiment.log({**values, **({} if step is None else {_STEP: step})})

    @rank_zero_only
    def log_hyperparams(self, params: HyperParameters) -> None:
        """Add hyper parameters, nested as they are, to the run's configuration."""
        self.experiment.config.update(nested_parameters(params), allow_val_change=True)

    @rank_zero_only
    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Log histograms of a module's gradients (or `"parameters"`, `"all"`), and its graph."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **options: Any) -> None:
        """Log images: tensors, arrays, images of Pillow, file names.

        Each of the `options`, such as `caption`, is a list with a value for each image.
        """
        self._log_media("Image", key, images, step, options)

    @rank_zero_only
    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **options: Any) -> None:
        """Log audio: arrays or file names. Options as of `log_image`; arrays need `sample_rate`."""
        self._log_media("Audio", key, audios, step, options)

    @rank_zero_only
    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **options: Any) -> None:
        """Log videos: arrays or file names. Options as of `log_image`."""
        self._log_media("Video", key, videos, step, options)

    def _log_media(
        self, kind: str, key: str, items: Sequence[Any], step: int | None, options: Mapping[str, Any]
    ) -> None:
        import wandb

        for option, values in options.items():
            if isinstance(values, str) or len(values) != len(items):
                raise ConfigurationError(
                    message=f"{option}={values!r} is not one value for each of {len(items)} items.",
                    remedy=f"{option}=[...], a list as long as the list of items.",
                )
        make = getattr(wandb, kind)
        media = [
            make(item, **{option: values[number] for option, values in options.items()})
            for number, item in enumerate(items)
        ]
        self._log(numbers({key: media}, self._prefix), step)

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table: rows, or a data frame of pandas."""
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self._log(numbers({key: table}, self._prefix), step)

    log_text = log_table

    def save(self) -> None:
        """Do nothing: W&B's own process has the logged values."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the run, if this process has begun it, and the stage has failed or this is a worker."""
        is_worker = multiprocessing.parent_process() is not None  # it ends without W&B's exit hook
        if self._run is None or self._run_pid != os.getpid() or (status == "success" and not is_worker):
            return
        import wandb

        self._run.finish(exit_code=0 if status == "success" else 1)
        self._run = None
        if is_worker and wandb.run is None:
            wandb.teardown()  # ends W&B's own process, and removes its files
        if is_worker:
            for folder in _temporary_folders():
                folder.cleanup()

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.version, "project": self._project}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._id, self._project = state_dict["id"], state_dict["project"]


def _run_in_progress(wanted: str | None) -> Any:
    """Return `wandb.run` if there is one, and it has the id that is wanted (None: any)."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return run if run is not None and wanted in (None, run.id) else None


def _temporary_folders() -> list[Any]:
    """Return W&B's temporary folders. It removes them in exit hooks, which do not run in a worker."""
    folders = []
    for module, name in _TEMPORARY_FOLDERS:
        with contextlib.suppress(KeyError, AttributeError):  # not imported, or of another version of W&B
            folders.append(operator.attrgetter(name)(sys.modules[module]))
    return folders


def _check_arguments(
    version: str | None,
    run_id: str | None,
    options: Mapping[str, Any],
    *,
    offline: bool,
    log_model: bool | str,
) -> None:
    if version is not None and run_id is not None and version != run_id:
        raise ConfigurationError(
            message=f"WandbLogger(version={version!r}, id={run_id!r}) names two runs.",
            remedy="leave out one of the two: both are the run's id.",
        )
    if log_model:
        raise ConfigurationError(
            message=f"WandbLogger(log_model={log_model!r}) would upload no checkpoint.",
            remedy="logger.experiment.log_model(checkpoint_callback.best_model_path) after fit().",
        )
    if offline and options.get("mode", "offline") != "offline":
        raise ConfigurationError(
            message=f"WandbLogger(offline=True, mode={options['mode']!r}) contradicts itself.",
            remedy="leave out one of the two.",
        )

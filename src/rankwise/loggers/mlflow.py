"""`MLFlowLogger`: metrics, hyper parameters and images in a run of MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final
from urllib.parse import unquote, urlparse

from rankwise.checks import check_installed
from rankwise.errors import ConfigurationError
from rankwise.loggers.base import Logger, rank_zero_experiment
from rankwise.loggers.values import HyperParameters, flat_parameters, image_array, numbers
from rankwise.paths import absolute_path
from rankwise.ranks import rank_zero_only

_FORBIDDEN = re.compile(r"[^\w/. -]")
_BATCH = 100  # how many parameters a request may hold
_STATUS = {"success": "FINISHED", "failed": "FAILED"}


@final
class MLFlowLogger(Logger):
    """Log to a run of MLflow, which begins with the first stage.

    Recent versions of MLflow refuse folders as stores unless `MLFLOW_ALLOW_FILE_STORE=true` is set.

    Args:
        experiment_name: the experiment that the run belongs to; it is made if it does not exist.
        run_name: the name of the run; MLflow makes one up by default.
        tracking_uri: where MLflow keeps its runs: a URI or a folder; by default `MLFLOW_TRACKING_URI`, or the
            folder `save_dir`.
        tags: tags of the run.
        save_dir: a folder, instead of `tracking_uri`.
        log_model: only False is accepted: checkpoints are not uploaded.
        prefix: put before the names of metrics and images, with a hyphen.
        artifact_location: where an experiment that is made keeps its artifacts.
        run_id: the id of a run to continue.
        synchronous: whether metrics are written before `log_metrics` returns; None for MLflow's setting.

    Raises:
        MissingExtraError: if mlflow is not installed.
        ConfigurationError: for `log_model`.
    """

    def __init__(
        self,
        experiment_name: str = "rankwise_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        check_installed("mlflow", "mlflow", "MLFlowLogger")
        if log_model:
            raise ConfigurationError(
                message=f"MLFlowLogger(log_model={log_model!r}) would upload no checkpoint.",
                remedy="logger.experiment.log_artifact(logger.run_id, checkpoint_callback.best_model_path).",
            )
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._tracking_uri = uri or Path(absolute_path(save_dir or "mlruns")).as_uri()
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._run_id = run_id
        self._experiment_id: str | None = None
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._pending: list[Any] = []  # asynchronous requests
        self._client: Any = None
        self._client_pid = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `mlflow.MlflowClient`, for calls with `run_id`; on other ranks its methods do nothing."""
        if self._client is None or self._client_pid != os.getpid():
            from mlflow import MlflowClient

            client = MlflowClient(self._tracking_uri)
            if self._run_id is None:
                self._begin(client)
            else:
                self._experiment_id = client.get_run(self._run_id).info.experiment_id
            self._client, self._client_pid = client, os.getpid()
        return self._client

    def _begin(self, client: Any) -> None:
        from mlflow.tracking.context.registry import resolve_tags

        found = client.get_experiment_by_name(self._experiment_name)
        self._experiment_id = (
            client.create_experiment(self._experiment_name, artifact_location=self._artifact_location)
            if found is None
            else found.experiment_id
        )
        run = client.create_run(self._experiment_id, tags=resolve_tags(self._tags), run_name=self._run_name)
        self._run_id = run.info.run_id

    @property
    def run_id(self) -> str | None:
        """The id of the run; on ranks other than 0 None until the first stage."""
        if self._run_id is None:
            _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment; on ranks other than 0 None until the first stage."""
        if self._experiment_id is None:
            _ = self.experiment
        return self._experiment_id

    name = experiment_id
    version = run_id

    @property
    def save_dir(self) -> str | None:
        """The folder in which MLflow keeps its runs; None for a server or a database."""
        parsed = urlparse(self._tracking_uri)
        if parsed.scheme not in ("", "file"):
            return None
        return absolute_path(unquote(parsed.path))

    @property
    def log_dir(self) -> str | None:
        """The folder in which MLflow keeps this run; None for a server or a database."""
        if self.save_dir is None or self.run_id is None:
            return None
        return str(Path(self.save_dir) / str(self.experiment_id) / self.run_id)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics. In their names, characters that MLflow does not allow are left out."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        values = numbers(metrics, self._prefix)
        self._send(
            metrics=[
                Metric(_FORBIDDEN.sub("", name), value, now_ms, step or 0) for name, value in values.items()
            ]
        )

    @rank_zero_only
    def log_hyperparams(self, params: HyperParameters) -> None:
        """Log hyper parameters, nested names joined by "/". MLflow refuses a value other than the first."""
        from mlflow.entities import Param

        flat = [Param(name, str(value)) for name, value in flat_parameters(params).items()]
        for start in range(0, len(flat), _BATCH):
            self._send(params=flat[start : start + _BATCH])

    def _send(self, **items: Any) -> None:
        sent = self.experiment.log_batch(self.run_id, **items, **self._options)
        if sent is not None:
            self._pending.append(sent)

    @rank_zero_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None) -> None:
        """Log images as `key/0`, `key/1` and so on; see `image_array` for their types."""
        for number, image in enumerate(images):
            name = next(iter(numbers({f"{key}/{number}": 0}, self._prefix)))
            self.experiment.log_image(self.run_id, image_array(image), key=name, step=step or 0)

    @rank_zero_only
    def save(self) -> None:
        """Wait until pending values are written."""
        pending, self._pending = self._pending, []
        for request in pending:
            request.wait()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run as finished or failed; a later stage continues it."""
        if self._run_id is None:
            return
        try:
            self.save()
        finally:
            self.experiment.set_terminated(self._run_id, _STATUS[status])

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "experiment_id": self.experiment_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run_id, self._experiment_id = state_dict["run_id"], state_dict["experiment_id"]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the client, which belongs to this process."""
        return {**self.__dict__, "_client": None, "_pending": []}

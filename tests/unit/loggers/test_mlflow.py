"""Runs of MLflow, read back by its client from a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.errors import ConfigurationError
from rankwise.loggers import MLFlowLogger
from tests.helpers.needs import need_installed

need_installed("mlflow")


def client(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(folder.as_uri())


@pytest.mark.full
def test_run(tmp_path: Path) -> None:
    """Metrics, hyper parameters, tags and images are in the run, in the folder that `log_dir` names."""
    logger = MLFlowLogger(
        "mine", run_name="first", save_dir=tmp_path / "runs", tags={"kind": "test"}, prefix="my"
    )
    logger.log_hyperparams({"opt": {"lr": 0.1}, **{f"p{number}": number for number in range(120)}})
    logger.log_metrics({"loss": torch.tensor(0.5), "a@b": 1.0}, step=3)
    logger.log_metrics({"loss": 0.25}, step=4)
    logger.log_image("digits", [torch.rand(3, 8, 8)], step=1)
    logger.finalize("failed")
    read = client(tmp_path / "runs")
    run = read.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["kind"]) == ("FAILED", "first", "test")
    assert (run.data.params["opt/lr"], len(run.data.params)) == ("0.1", 121)
    history = read.get_metric_history(logger.run_id, "my-loss")
    assert [(metric.step, metric.value) for metric in history] == [(3, 0.5), (4, 0.25)]
    assert run.data.metrics["my-ab"] == 1.0
    assert any("digits" in item.path for item in read.list_artifacts(logger.run_id, "images"))
    assert (Path(logger.log_dir or "") / "metrics" / "my-loss").exists()
    assert (logger.version, logger.name) == (logger.run_id, run.info.experiment_id)
    assert read.get_experiment(logger.experiment_id).name == "mine"


def test_later_runs(tmp_path: Path) -> None:
    """A second logger begins another run of the same experiment; one with `run_id` continues a run."""
    first = MLFlowLogger("mine", tracking_uri=tmp_path.as_uri())
    second = MLFlowLogger("mine", tracking_uri=str(tmp_path))
    first.log_metrics({"loss": 1.0}, 1)
    assert first.experiment_id == second.experiment_id
    assert first.run_id != second.run_id
    continued = MLFlowLogger(tracking_uri=tmp_path.as_uri(), run_id=first.run_id)
    continued.log_metrics({"loss": 2.0}, 2)
    continued.finalize("success")
    assert (continued.log_dir, continued.save_dir) == (first.log_dir, str(tmp_path))
    read = client(tmp_path)
    assert [metric.value for metric in read.get_metric_history(first.run_id, "loss")] == [1.0, 2.0]
    assert read.get_run(first.run_id).info.status == "FINISHED"


def test_asynchronous(tmp_path: Path) -> None:
    """`synchronous=False` writes in a thread, all at the end; who loads the state writes to the same run."""
    logger = MLFlowLogger(save_dir=tmp_path, synchronous=False)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step)
    logger.finalize("success")
    history = client(tmp_path).get_metric_history(logger.run_id, "loss")
    assert sorted(metric.step for metric in history) == [0, 1, 2]
    other = MLFlowLogger(save_dir=tmp_path)
    other.load_state_dict(logger.state_dict())
    assert (other.run_id, other.experiment_id) == (logger.run_id, logger.experiment_id)
    assert other.log_dir == logger.log_dir


def test_servers_have_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is the default; a server or database has no folder. `log_model` would upload nothing."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert (MLFlowLogger().save_dir, MLFlowLogger().log_dir) == (None, None)
    assert MLFlowLogger(tracking_uri="sqlite:///runs.db").save_dir is None
    with pytest.raises(ConfigurationError, match="would upload no checkpoint"):
        MLFlowLogger(log_model="all")

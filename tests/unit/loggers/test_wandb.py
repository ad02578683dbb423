"""Offline runs of Weights & Biases, read back from their files."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.errors import ConfigurationError
from rankwise.loggers import WandbLogger
from tests.helpers.logger_files import OfflineRun, offline_runs
from tests.helpers.needs import need_installed
from tests.helpers.scripts import ScriptRunner

need_installed("wandb")


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Import W&B before a test: it makes temporary folders, which stay until the process ends."""
    importlib.import_module("wandb")


def recorded(folder: Path) -> list[OfflineRun]:
    """Return the runs in a folder, once W&B's own process has written all."""
    import wandb

    wandb.teardown()
    return offline_runs(folder)


def offline(folder: Path, **options: Any) -> WandbLogger:
    return WandbLogger(save_dir=folder, offline=True, project="project", **options)


MEDIA = """
    import sys

    import numpy as np
    import torch
    from torch import nn

    from rankwise.loggers import WandbLogger

    logger = WandbLogger(save_dir=sys.argv[1], offline=True, project="project", prefix="my")
    logger.log_image("digits", [torch.rand(3, 4, 5), np.zeros((4, 5))], step=4, caption=["first", "second"])
    logger.log_text("words", columns=["text"], data=[["hello"]])
    logger.watch(nn.Linear(1, 1))
"""


@pytest.mark.full
def test_run(tmp_path: Path) -> None:
    """Metrics and hyper parameters are in the run's file; a failure is its exit code."""
    logger = offline(tmp_path, version="one", prefix="my", group="tests")
    logger.log_hyperparams({"opt": {"lr": 0.1}})
    logger.log_metrics({"loss": torch.tensor(0.5)}, step=3)
    assert logger.experiment.group == "tests"
    logger.finalize("failed")
    (run,) = recorded(tmp_path)
    assert (run.id, run.project, run.exit_code) == ("one", "project", 1)
    assert run.config["opt"] == {"lr": 0.1}
    (line,) = run.history
    assert (line["my-loss"], line["trainer/global_step"]) == (0.5, 3)


@pytest.mark.full
def test_media(tmp_path: Path, run_script: ScriptRunner) -> None:
    """Images and tables are in the run, which the end of the program finishes."""
    result = run_script(MEDIA, str(tmp_path))
    assert result.returncode == 0, result
    (run,) = offline_runs(tmp_path)
    text = f"{run.history}"
    assert run.exit_code == 0
    assert [name for name in ("my-digits", "first", "second", "my-words") if name not in text] == []
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png"))) == 2


def test_run_goes_on_after_a_success(tmp_path: Path) -> None:
    """The program may log more to the run, which is `wandb.run`; a later failure ends it."""
    import wandb

    logger = offline(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    wandb.log({"more": 2.0})
    logger.save()
    logger.finalize("failed")
    (run,) = recorded(tmp_path)
    assert [line.get("more") for line in run.history] == [None, 2.0]
    assert run.id == logger.version


def test_run_in_progress(tmp_path: Path) -> None:
    """A run that the program has begun is used, and is the program's to finish."""
    import wandb

    run = wandb.init(dir=tmp_path, project="theirs", id="theirs", mode="offline")
    logger, given = WandbLogger(save_dir=tmp_path), WandbLogger(save_dir=tmp_path, experiment=run)
    assert (logger.version, given.version) == ("theirs", "theirs")
    logger.log_metrics({"loss": 1.0})
    given.log_metrics({"loss": 2.0})
    assert (logger.name, given.name) == ("theirs", "theirs")
    logger.finalize("failed")
    assert wandb.run is not None  # as long as the program has not finished it
    run.finish()
    (read,) = recorded(tmp_path)
    assert [line["loss"] for line in read.history] == [1.0, 2.0]
    assert read.exit_code == 0


def test_two_runs(tmp_path: Path) -> None:
    """Two ids are two runs; a new run's is random, names its folder, and reaches other processes."""
    loggers = [offline(tmp_path, id=name) for name in ("one", "two")]
    for number, logger in enumerate(loggers):
        logger.log_metrics({"loss": float(number)})
    for logger in loggers:
        logger.finalize("failed")
    runs = {run.id: [line["loss"] for line in run.history] for run in recorded(tmp_path)}
    assert runs == {"one": [0.0], "two": [1.0]}
    logger, other = offline(tmp_path), offline(tmp_path)
    assert re.fullmatch("[a-z0-9]{8}", logger.version)
    assert logger.log_dir == str(tmp_path / "project" / logger.version)
    assert logger.save_dir == WandbLogger(dir=tmp_path).save_dir
    other.load_state_dict(logger.state_dict())
    assert other.log_dir == logger.log_dir


def test_refused(tmp_path: Path) -> None:
    """What contradicts, or would have no effect, is an error; there must be a caption for each image."""
    problems: dict[str, dict[str, Any]] = {
        "names two runs": {"version": "a", "id": "b"},
        "would upload no checkpoint": {"log_model": "all"},
        "contradicts itself": {"offline": True, "mode": "online"},
    }
    for problem, options in problems.items():
        with pytest.raises(ConfigurationError, match=problem):
            WandbLogger(**options)
    with pytest.raises(ConfigurationError, match="not one value for each of 2 items"):
        offline(tmp_path).log_image("digits", [torch.rand(4, 4), torch.rand(4, 4)], caption=["a"])

"""What all loggers have in common: one rank writes, all are finalized, missing packages are named."""

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.errors import MissingExtraError
from rankwise.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
    rank_zero_experiment,
)
from rankwise.loggers.base import NoExperiment, finalize_all
from rankwise.ranks import rank_zero_only
from tests.helpers.needs import need_installed
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Failing, Line, fitted


class Recording(Logger):
    """A logger of the user's own, with an experiment."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The list of calls."""
        return self.calls

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.append((dict(metrics), step))

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.experiment.append(dict(params))

    def finalize(self, status: str) -> None:
        self.calls.append(status)
        if self.error is not None:
            raise self.error


def test_a_logger_of_the_users(tmp_path: Path) -> None:
    """It gets hyper parameters, metrics with their step, and the end; the module can use its experiment."""
    logger, model = Recording(), Line()
    model.hparams = {"lr": 0.1}
    fitted(tmp_path, model, logger=logger, log_every_n_steps=4)
    params, (metrics, step), end = logger.calls
    assert (params, step, end) == ({"lr": 0.1}, 3, "success")
    assert set(metrics) == {"epoch", "loss"}


def test_defaults_of_the_base_class() -> None:
    """A logger that only logs has no experiment, name, version or folder."""

    class Minimal(Logger):
        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...

    logger = Minimal()
    assert [logger.experiment, logger.name, logger.version, logger.save_dir, logger.log_dir] == [None] * 5
    assert (logger.log_dirs, logger.state_dict()) == ([], {})


@pytest.mark.usefixtures("on_rank_one")
def test_experiment_on_other_ranks(tmp_path: Path) -> None:
    """Every attribute, item and call of it does nothing; what every rank calls writes on one."""
    logger = Recording()
    experiment = logger.experiment
    assert isinstance(experiment, NoExperiment)
    experiment.config.update({"a": 1})
    experiment.summary["best"] = experiment["best"] = 1
    experiment.name = "run"
    experiment.log_artifact("file").wait()
    with experiment.span() as span:
        assert list(span) == []
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(experiment))), NoExperiment)
    logger.log_metrics({"loss": 1.0})
    assert logger.calls == []
    csv = CSVLogger(tmp_path)
    csv.log_metrics({"loss": 1.0})
    csv.log_hyperparams({"lr": 1.0})
    csv.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_stage(tmp_path: Path) -> None:
    """Every logger is finalized as failed, and what was logged before is written."""
    csv, own = CSVLogger(tmp_path, version=0), Recording()
    raises(ValueError, "broken", fitted, tmp_path, Failing(at=1), logger=[csv, own], log_every_n_steps=1)
    assert own.calls[-1] == "failed"
    assert (Path(csv.log_dir) / "metrics.csv").read_text().count("\n") == 2


def test_a_failed_teardown(tmp_path: Path) -> None:
    """A hook that fails at the very end makes the stage a failed one, and the loggers are finalized."""

    class Last(Line):
        def teardown(self, stage: str) -> None:
            raise ValueError("teardown")

    logger = Recording()
    raises(ValueError, "teardown", fitted, tmp_path, Last(), logger=logger)
    assert logger.calls[-1] == "failed"


def test_a_logger_that_cannot_be_finalized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others are; its error is raised after a success, and reported beside the stage's own."""
    first, second = Recording(OSError("disk full")), Recording()
    raises(OSError, "disk full", finalize_all, [first, second, second], "success")
    assert second.calls == ["success"]
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="broken"):
        fitted(tmp_path, Failing(at=1), logger=first)
    assert "disk full" in caplog.text


MADE: dict[str, Callable[[Path], Any]] = {
    "tensorboard": lambda folder: TensorBoardLogger(folder, log_graph=True),
    "wandb": lambda folder: WandbLogger(save_dir=folder, offline=True, project="project"),
    "mlflow": lambda folder: MLFlowLogger(save_dir=folder),
}


@pytest.mark.usefixtures("on_rank_one")
@pytest.mark.parametrize("package", MADE)
def test_other_ranks(package: str, tmp_path: Path) -> None:
    """Nothing is written there, and no run is begun."""
    need_installed(package)
    logger = MADE[package](tmp_path)
    assert isinstance(logger.experiment, NoExperiment)
    logger.experiment.config.update({"lr": 1})
    logger.log_metrics({"loss": 1.0})
    logger.log_hyperparams({"lr": 1})
    logger.log_image("digits", [torch.rand(4, 4)])
    if package == "tensorboard":
        logger.log_graph(Line())
    elif package == "wandb":
        logger.watch(Line())
    else:
        assert (logger.run_id, logger.log_dir) == (None, None)
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", MADE)
def test_missing_packages(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package a logger names the extra at once; a folder of that name is no package."""
    (tmp_path / package).mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    raises(MissingExtraError, rf'pip install "rankwise\[{package}\]"', MADE[package], tmp_path)


def test_packages_are_imported_when_used() -> None:
    """`rankwise.loggers` alone needs none of the packages."""
    source = "import sys, rankwise.loggers; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert {"wandb", "mlflow", "tensorboard"} & {*result.stdout.split()} == set()

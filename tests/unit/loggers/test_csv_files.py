"""Metrics in CSV files."""

import csv
import json
from pathlib import Path

import pytest

from rankwise.errors import InvalidArgumentError
from rankwise.loggers import CSVLogger
from rankwise.ranks import rank_zero_only


def lines(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_lines(tmp_path: Path) -> None:
    """Each call is a line, with its step and prefix; lines are written once there are enough of them."""
    named = CSVLogger(tmp_path, name="", version="v", prefix="my")
    for logger, name in ((CSVLogger(tmp_path), "loss"), (named, "my-loss")):
        logger.log_metrics({"loss": 0.5}, step=3)
        logger.save()
        assert lines(logger) == [{name: "0.5", "step": "3"}]
    assert named.log_dir == str(tmp_path / "v")
    assert CSVLogger(tmp_path, name="runs", version="first").log_dir == str(tmp_path / "runs" / "first")
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=2)
    logger.log_metrics({"loss": 1.0})
    assert not Path(logger.log_dir).exists()
    logger.log_metrics({"loss": 2.0})
    assert len(lines(logger)) == 2
    with pytest.raises(InvalidArgumentError, match="flush_logs_every_n_steps"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_new_columns(tmp_path: Path) -> None:
    """They are empty in the lines before; nothing is left of a file that another program has made longer."""
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.save()
    logger.log_metrics({"accuracy": 0.9}, step=2)
    logger.finalize("success")
    expected = [{"loss": "0.5", "step": "1", "accuracy": ""}, {"loss": "", "step": "2", "accuracy": "0.9"}]
    assert lines(logger) == expected
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.save()
    (Path(logger.log_dir) / "metrics.csv").write_text('"loss","step"\n' + "\n" * 80 + '"0.5","1"\n')
    logger.log_metrics({"accuracy": 0.9}, step=2)
    logger.save()
    assert [line["step"] for line in lines(logger)] == ["1", "2"]


def test_versions_count_up(tmp_path: Path) -> None:
    """A run takes the number after the highest that is there, and keeps it; with its state, too."""
    (tmp_path / "rankwise_logs" / "version_9").mkdir(parents=True)
    (tmp_path / "rankwise_logs" / "version_best").mkdir()
    logger = CSVLogger(tmp_path)
    assert logger.version == 10
    assert logger.log_dir == str(tmp_path / "rankwise_logs" / "version_10")
    (tmp_path / "rankwise_logs" / "version_10").mkdir()
    assert logger.version == 10
    other = CSVLogger(tmp_path)
    other.load_state_dict(logger.state_dict())
    assert other.log_dir == logger.log_dir


def test_hyper_parameters(tmp_path: Path) -> None:
    """Hyper parameters become JSON, whatever they are."""
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "data": Path("here")})
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text()) == {"lr": 0.1, "data": "here"}


def test_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`experiment` has the methods of Lightning's, and writes into the logger's files, on rank zero only."""
    logger = CSVLogger(tmp_path)
    experiment = logger.experiment
    experiment.log_hparams({"lr": 0.1})
    experiment.log_metrics({"loss": 0.5}, step=3)
    assert experiment.metrics == logger.unsaved == [{"loss": 0.5, "step": 3}]
    experiment.save()
    assert lines(logger) == [{"loss": "0.5", "step": "3"}]
    assert json.loads((Path(experiment.log_dir) / "hparams.json").read_text()) == {"lr": 0.1}
    assert Path(experiment.metrics_file_path).name == "metrics.csv"
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    logger.experiment.log_metrics({"loss": 0.7}, step=4)
    logger.save()
    assert len(lines(logger)) == 1

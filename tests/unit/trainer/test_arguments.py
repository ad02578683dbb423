"""The Trainer's arguments: what is wrong is said in the constructor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.environments import LocalEnvironment
from rankwise.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    UnknownNameError,
    UnknownStrategyError,
)
from rankwise.loggers import CSVLogger
from rankwise.precision import Precision
from rankwise.strategies import DDPSpawnStrategy, SingleDeviceStrategy
from tests.unit.trainer.helpers import trainer


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": -2},
        {"max_steps": -2},
        {"min_epochs": -1},
        {"limit_train_batches": 1.5},
        {"limit_val_batches": -1},
        {"limit_test_batches": -0.1},
        {"limit_predict_batches": float("nan")},
        {"fast_dev_run": -1},
        {"val_check_interval": 0},
        {"check_val_every_n_epoch": 0},
        {"num_sanity_val_steps": 2},
        {"accumulate_grad_batches": 0},
        {"gradient_clip_val": -1},
        {"gradient_clip_algorithm": "size"},
        {"log_every_n_steps": 0},
        {"devices": 0},
        {"devices": -2},
        {"devices": [0, 0]},
        {"num_nodes": 0},
    ],
)
def test_impossible_values(tmp_path: Path, options: dict[str, Any]) -> None:
    """A value out of range is refused, naming the argument."""
    with pytest.raises(InvalidArgumentError) as caught:
        trainer(tmp_path, **options)
    assert caught.value.argument in options


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": "3"},
        {"max_steps": 2.0},
        {"max_epochs": True},
        {"limit_train_batches": "all"},
        {"accumulate_grad_batches": None},
        {"gradient_clip_val": "1"},
        {"precision": 3.5},
        {"strategy": 3},
        {"strategy": DDPSpawnStrategy},
        {"plugins": [3]},
        {"callbacks": [print]},
        {"callbacks": EarlyStopping},
        {"logger": "csv"},
        {"devices": 1.5},
    ],
)
def test_wrong_kinds(tmp_path: Path, options: dict[str, Any]) -> None:
    """A value of a wrong type is refused, naming the argument."""
    with pytest.raises(InvalidTypeError) as caught:
        trainer(tmp_path, **options)
    assert caught.value.argument in options


def test_class_instead_of_instance(tmp_path: Path) -> None:
    """A class where an instance is needed is told from other mistakes."""
    with pytest.raises(InvalidTypeError, match=r"make an instance of it: DDPSpawnStrategy\(\)"):
        trainer(tmp_path, strategy=DDPSpawnStrategy)


def test_unknown_names(tmp_path: Path) -> None:
    """Unknown strategies, precisions and environments are refused by name."""
    with pytest.raises(UnknownStrategyError, match="Did you mean 'ddp'"):
        trainer(tmp_path, strategy="dpp")
    with pytest.raises(UnknownNameError, match="Unknown precision '8-bit'"):
        trainer(tmp_path, precision="8-bit")
    with pytest.raises(UnknownNameError, match="Did you mean 'torchelastic'"):
        trainer(tmp_path, plugins="torchelastc")


def test_plugins_by_kind(tmp_path: Path) -> None:
    """Each plug-in goes where its kind belongs."""
    precision, checkpoint_io, environment = Precision(), TorchCheckpointIO(), LocalEnvironment()
    strategy = SingleDeviceStrategy()
    plugins = [precision, checkpoint_io, environment, strategy]
    train = trainer(tmp_path, strategy="auto", plugins=plugins)
    assert train.strategy is strategy
    assert strategy.precision is precision
    assert strategy.checkpoint_io is checkpoint_io
    assert strategy.environment is environment


def test_environment_by_name(tmp_path: Path) -> None:
    """An environment can be named among the plug-ins."""
    assert trainer(tmp_path, plugins=["local"]).strategy.environment.name == "local"


@pytest.mark.parametrize(
    "options",
    [
        {"plugins": [Precision(), Precision()]},
        {"plugins": ["local", LocalEnvironment()]},
        {"plugins": [Precision()], "precision": 32},
        {"plugins": [SingleDeviceStrategy()], "strategy": "ddp"},
        {"callbacks": ModelCheckpoint(), "enable_checkpointing": False},
        {"callbacks": TQDMProgressBar(), "enable_progress_bar": False},
        {"callbacks": [EarlyStopping("loss"), EarlyStopping("loss")]},
    ],
)
def test_contradictions(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two answers to one question are refused."""
    with pytest.raises(ConfigurationError):
        trainer(tmp_path, **options)


def test_default_callbacks(tmp_path: Path) -> None:
    """A progress bar and a checkpoint are there by default, the checkpoint last."""
    own = Callback()
    train = trainer(
        tmp_path, callbacks=[ModelCheckpoint(), own], enable_checkpointing=True, enable_progress_bar=None
    )
    assert [type(callback) for callback in train.callbacks] == [Callback, TQDMProgressBar, ModelCheckpoint]
    only = trainer(tmp_path, enable_checkpointing=True)
    assert [type(callback) for callback in only.callbacks] == [ModelCheckpoint]


def test_default_logger(tmp_path: Path) -> None:
    """There is a CSV logger unless it is turned off."""
    for default in (None, True):
        train = trainer(tmp_path, logger=default)
        assert isinstance(train.logger, CSVLogger)
        assert train.log_dir == str(tmp_path / "rankwise_logs" / "version_0")
    assert trainer(tmp_path, logger=False).logger is None


def test_limits_can_be_raised(tmp_path: Path) -> None:
    """max_epochs and max_steps may be set later, and are checked then too."""
    train = trainer(tmp_path)
    train.max_epochs, train.max_steps = 5, 10
    with pytest.raises(InvalidArgumentError, match="max_epochs=-3"):
        train.max_epochs = -3

"""Callbacks on two ranks: one decides or writes, all agree, and the calling process has the state."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rankwise.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from rankwise.errors import ConfigurationError
from rankwise.loggers import CSVLogger
from tests.process.training_tasks import Regression, loader, quiet_trainer


def test_learning_rates_are_logged_once(tmp_path: Path) -> None:
    """One rank logs, and the caller of spawned ranks has all values."""
    monitor, logger = LearningRateMonitor(), CSVLogger(tmp_path)
    trainer = quiet_trainer("ddp_spawn", 2, max_epochs=2, callbacks=monitor, logger=logger)
    trainer.fit(Regression("adam"), loader(16, 4))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["lr-Adam"]]
    assert [(row["step"], float(row["lr-Adam"])) for row in rows] == [("0", 0.01), ("2", 0.005)]
    assert monitor.lrs == {"lr-Adam": [0.01, 0.005]}


class Worse(Regression):
    """Has a value that is worse in the second epoch, on rank 1 only."""

    def on_validation_epoch_end(self) -> None:
        self.log("value", float(self.current_epoch * self.global_rank), sync_dist=True)


def test_early_stopping_after_epochs() -> None:
    """With check_on_train_epoch_end all ranks stop after the same epoch."""
    stopping = EarlyStopping(
        "value", patience=1, check_on_train_epoch_end=True, verbose=True, log_rank_zero_only=True
    )
    trainer = quiet_trainer("ddp_fork", 2, max_epochs=9, callbacks=stopping)
    trainer.fit(Worse(), loader(16, 4), loader(8, 4))
    assert (trainer.current_epoch, stopping.stopped_epoch) == (2, 1)


class OneClock(ModelCheckpoint):
    """Rank 1's clock says that it is never time to save."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        if trainer.global_rank == 1:
            self.train_time_interval = timedelta(days=1)


def test_checkpoints_by_time(tmp_path: Path) -> None:
    """Rank 0's clock counts; a linked last checkpoint is one file with the best."""
    saving = OneClock(
        tmp_path, "{step}", save_top_k=-1, train_time_interval=timedelta(microseconds=1), save_last="link"
    )
    trainer = quiet_trainer("ddp_fork", 2, max_epochs=1, callbacks=saving, enable_checkpointing=True)
    trainer.fit(Regression(), loader(16, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt"]
    assert Path(saving.last_model_path).samefile(tmp_path / "step=2.ckpt")


def test_save_on_exception_is_refused() -> None:
    """One rank's exception ends the others, so there is nobody to write a checkpoint with."""
    saving = ModelCheckpoint(save_on_exception=True)
    trainer = quiet_trainer("ddp_fork", 2, callbacks=saving, enable_checkpointing=True)
    with pytest.raises(ConfigurationError, match="works in one process only"):
        trainer.fit(Regression(), loader(16, 4))

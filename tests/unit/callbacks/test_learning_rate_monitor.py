"""What `LearningRateMonitor` logs, and when."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.callbacks import LearningRateMonitor, ModelCheckpoint
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import ConfigurationError, InvalidArgumentError
from rankwise.loggers import CSVLogger
from tests.unit.trainer.helpers import Line, WithTwoOptimizers, fitted, loader, trainer


class Decaying(Line):
    """Halves the rate after every step or epoch."""

    def __init__(self, optimizer: Any = None, **options: Any) -> None:
        super().__init__()
        self.optimizer = optimizer or torch.optim.SGD(self.parameters(), 0.8)
        self.options = options

    def configure_optimizers(self) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}


def rows(folder: Path, monitor: LearningRateMonitor, module: Line, **options: Any) -> list[dict[str, str]]:
    """Train two epochs of four batches; return the logged rows that are the monitor's."""
    logger = CSVLogger(folder)
    options = {"log_every_n_steps": 1, "max_epochs": 2, **options}
    trainer(folder, callbacks=monitor, logger=logger, **options).fit(module, loader())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    return [row for row in found if any(name.startswith(("lr-", "own")) and row[name] for name in row)]


def values(found: list[dict[str, str]], name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in found if row[name]]


def test_steps(tmp_path: Path) -> None:
    """A rate that changes after each step is logged for each step, with the value that the step uses."""
    monitor = LearningRateMonitor()
    found = rows(tmp_path, monitor, Decaying(interval="step"), max_epochs=1)
    assert values(found, "lr-SGD") == [(0, 0.8), (1, 0.4), (2, 0.2), (3, 0.1)]
    assert monitor.lrs == {"lr-SGD": [0.8, 0.4, 0.2, 0.1]}


def test_log_every_n_steps(tmp_path: Path) -> None:
    """Steps are logged as often as other metrics, and once per accumulation window; epochs as they begin."""
    module = Decaying(interval="step")
    found = rows(tmp_path, LearningRateMonitor("step"), module, log_every_n_steps=2)
    assert [step for step, _ in values(found, "lr-SGD")] == [1, 3, 5, 7]
    module = Decaying(interval="epoch")
    found = rows(tmp_path, LearningRateMonitor("step"), module, accumulate_grad_batches=2)
    assert values(found, "lr-SGD") == [(0, 0.8), (1, 0.8), (2, 0.4), (3, 0.4)]
    found = rows(tmp_path, LearningRateMonitor(), Decaying())
    assert values(found, "lr-SGD") == [(0, 0.8), (4, 0.4)]
    found = rows(tmp_path, LearningRateMonitor("epoch"), Decaying(interval="step"))
    assert [step for step, _ in values(found, "lr-SGD")] == [0, 4]


def test_momentum_and_weight_decay(tmp_path: Path) -> None:
    """They follow the rate's name; for an optimizer without momentum it warns and logs 0."""
    module = Decaying()
    module.optimizer = torch.optim.AdamW(module.parameters(), 0.1, betas=(0.7, 0.9), weight_decay=0.3)
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    [first, _] = rows(tmp_path, monitor, module)
    assert (first["lr-AdamW-momentum"], first["lr-AdamW-weight_decay"]) == ("0.7", "0.3")
    assert monitor.last_momentum_values == {"lr-AdamW-momentum": 0.7}
    assert monitor.last_weight_decay_values == {"lr-AdamW-weight_decay": 0.3}
    module = Decaying()
    module.optimizer = torch.optim.Adagrad(module.parameters(), 0.1)
    monitor = LearningRateMonitor(log_momentum=True)
    with pytest.warns(UserWarning, match="logs 0 for the optimizers that have no momentum"):
        rows(tmp_path, monitor, module)
    assert monitor.last_momentum_values == {"lr-Adagrad-momentum": 0}


class TwoGroups(Line):
    """One optimizer with two groups; `names` are theirs."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": [self.layer.weight]}, {"params": [self.layer.bias]}]
        for group, name in zip(groups, self.names, strict=False):
            group["name"] = name
        return torch.optim.SGD(groups, 0.1)


def test_parameter_groups(tmp_path: Path) -> None:
    """Groups are numbered, or have names of their own; without a scheduler both intervals are logged."""
    monitor = LearningRateMonitor()
    rows(tmp_path, monitor, TwoGroups(), max_epochs=1)
    assert monitor.lrs == {"lr-SGD/pg1": [0.1] * 5, "lr-SGD/pg2": [0.1] * 5}
    monitor = LearningRateMonitor("epoch")
    rows(tmp_path, monitor, TwoGroups("weight", "bias"), max_epochs=1)
    assert set(monitor.lrs) == {"lr-SGD/weight", "lr-SGD/bias"}
    with pytest.raises(ConfigurationError, match=r"cannot tell parameter groups.*apart"):
        rows(tmp_path, LearningRateMonitor(), TwoGroups("same", "same"))


class WithNamedScheduler(WithTwoOptimizers):
    """One of its optimizers has a scheduler that has a name."""

    def configure_optimizers(self) -> Any:
        first, second = super().configure_optimizers()
        return [first, second], [{"scheduler": torch.optim.lr_scheduler.StepLR(second, 1), "name": "own"}]


class EverySecond(WithNamedScheduler):
    """Steps in every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            super().training_step(batch, batch_idx)


def test_two_optimizers(tmp_path: Path) -> None:
    """In manual optimisation all are logged, by a scheduler's name; each batch is a step, as in Lightning."""
    monitor = LearningRateMonitor("step")
    rows(tmp_path, monitor, WithNamedScheduler(), max_epochs=1, log_every_n_steps=2)
    assert monitor.lrs == {"own": [0.1, 0.1], "lr-SGD": [0.1, 0.1]}
    found = rows(tmp_path, LearningRateMonitor("step"), EverySecond(), max_epochs=1)
    assert values(found, "lr-SGD") == [(0, 0.1), (1, 0.1), (2, 0.1), (3, 0.1)]


def test_no_logger(tmp_path: Path) -> None:
    """Without a logger it is refused before training, but for a short trial run; so is another interval."""
    with pytest.raises(ConfigurationError, match="has no logger"):
        trainer(tmp_path, callbacks=LearningRateMonitor()).fit(Line(), loader())
    trainer(tmp_path, callbacks=LearningRateMonitor(), fast_dev_run=True).fit(Line(), loader())
    with pytest.raises(InvalidArgumentError, match="logging_interval"):
        LearningRateMonitor("batch")


def test_checkpoints_do_not_grow(tmp_path: Path) -> None:
    """The record is in memory only; other callbacks can read the rate."""
    monitor, saving = LearningRateMonitor(), ModelCheckpoint(tmp_path)
    train = fitted(tmp_path, Decaying(interval="step"), callbacks=[monitor, saving], logger=True)
    saved = TorchCheckpointIO().load_checkpoint(saving.best_model_path)
    assert monitor.state_key not in saved["callbacks"]
    train = fitted(tmp_path, Decaying(), callbacks=monitor, logger=True)
    assert float(train.callback_metrics["lr-SGD"]) == 0.8

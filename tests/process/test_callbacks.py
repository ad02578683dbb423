"""Callbacks on two ranks: one decides or writes, all agree, and the calling process has the state."""

import csv
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankwise.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from rankwise.errors import ConfigurationError, WorkerRaisedError
from rankwise.loggers import CSVLogger
from tests.process.exception_tasks import Fails
from tests.process.training_tasks import FEATURES, Regression, dataset, loader, quiet_trainer


def test_what_monitors_log(tmp_path: Path) -> None:
    """One rank logs the learning rates and the throughput of all; the caller of the ranks has the rates."""
    monitor, logger = LearningRateMonitor(), CSVLogger(tmp_path)
    callbacks = [monitor, ThroughputMonitor(lambda batch: len(batch[0]))]
    options = {"max_epochs": 2, "log_every_n_steps": 1, "logger": logger}
    quiet_trainer("ddp_fork", 2, callbacks=callbacks, **options).fit(Regression("adam"), loader(16, 4))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [(row["step"], float(row["lr-Adam"])) for row in rows if row["lr-Adam"]]
    assert rates == [("0", 0.01), ("2", 0.005)]
    assert monitor.lrs == {"lr-Adam": [0.01, 0.005]}
    steps = [row for row in rows if row["train/batches"]]
    assert [row["train/samples"] for row in steps] == ["4.0", "8.0", "12.0", "16.0"]
    of_all, of_one = (float(steps[1][f"train/{of}samples_per_sec"]) for of in ("", "device/"))
    assert of_all == pytest.approx(2 * of_one)


class Worse(Regression):
    """Has a value that is worse in the second epoch, on rank 1 only."""

    def on_validation_epoch_end(self) -> None:
        self.log("value", float(self.current_epoch * self.global_rank), sync_dist=True)


@pytest.mark.quick
def test_early_stopping_after_epochs() -> None:
    """With check_on_train_epoch_end all ranks stop after the same epoch."""
    options: dict[str, Any] = {"check_on_train_epoch_end": True, "verbose": True, "log_rank_zero_only": True}
    stopping = EarlyStopping("value", patience=1, **options)
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
    often = timedelta(microseconds=1)
    saving = OneClock(tmp_path, "{step}", save_top_k=-1, train_time_interval=often, save_last="link")
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


class Normalised(Regression):
    """Has statistics of its batches, which differ between ranks; notes the ranks' sums in validations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def on_validation_epoch_end(self) -> None:
        sums = [float(each.double().sum()) for each in self.state_dict().values()]
        assert len(set(map(tuple, self.trainer.strategy.all_gather_object(sums)))) == 1


@pytest.mark.soak
def test_averaged_weights_are_everybodys(tmp_path: Path) -> None:
    """All ranks validate one average; their caller gets it, and the checkpoint has it."""
    saving = ModelCheckpoint(tmp_path, "own")
    options = {"callbacks": [EMAWeightAveraging(decay=0.5), saving], "enable_checkpointing": True}
    module = Normalised()
    trainer = quiet_trainer("ddp_forkserver", 2, max_epochs=2, **options)
    trainer.fit(module, loader(16, 4), loader(8, 4))
    saved, found = torch.load(saving.best_model_path, weights_only=True), module.state_dict()
    torch.testing.assert_close(dict(found), dict(saved["state_dict"]))
    assert not torch.equal(saved["current_model_state"]["net.0.weight"], found["net.0.weight"])


def assert_same_weights(*modules: nn.Module) -> None:
    one, two = (list(module.parameters()) for module in modules)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_the_average_of_one_process() -> None:
    """Two ranks average the last epochs as one process does; then the module's scheduler is back."""
    modules = [Regression("adam"), Regression("adam")]
    for module, devices, strategy in zip(modules, (1, 2), ("single_device", "ddp_fork"), strict=True):
        averaging = StochasticWeightAveraging(0.02, 2, annealing_epochs=2)
        trainer = quiet_trainer(strategy, devices, max_epochs=3, callbacks=averaging)
        trainer.fit(module, loader(16, 8 // devices))
        assert len(trainer.lr_scheduler_configs) == 1
    assert_same_weights(*modules)


class WithRate(Regression):
    lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def test_the_learning_rate_of_one_process() -> None:
    """Two ranks search as one process does, and train with the same learning rate; the caller has both."""
    found: list[Any] = []
    for devices, strategy in ((1, "single_device"), (2, "ddp_fork")):
        module, finder = WithRate(), LearningRateFinder(1e-3, 1.0, 20)
        trainer = quiet_trainer(strategy, devices, max_epochs=1, callbacks=finder)
        trainer.fit(module, loader(16, 8 // devices))
        assert finder.optimal_lr is not None
        assert trainer.optimizers[0].param_groups[0]["lr"] == module.lr == finder.optimal_lr.suggestion()
        found.append([module.lr, *finder.optimal_lr.results["loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


class WithBackbone(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(FEATURES, FEATURES, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], 0.01)


def test_a_backbone_on_two_ranks() -> None:
    """Two fits, of forked ranks, train the backbone from its epoch on as one fit of one process does."""
    module, expected, callback = WithBackbone(), WithBackbone(), BackboneFinetuning(1)
    one = quiet_trainer("single_device", 1, max_epochs=4, callbacks=BackboneFinetuning(1))
    one.fit(expected, loader(16, 8))
    two = quiet_trainer("ddp_fork", 2, max_epochs=2, callbacks=callback)
    two.fit(module, loader(16, 4))
    assert callback.previous_backbone_lr == pytest.approx(0.001)
    two.max_epochs = 4
    two.fit(module, loader(16, 4))
    assert_same_weights(module, expected)


class Writing(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((predictions, batch_indices), self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.quick
def test_each_rank_writes_its_predictions(tmp_path: Path) -> None:
    """The files of both ranks have every sample once, and say which, also where workers load ahead."""
    trainer = quiet_trainer("ddp_fork", 2, callbacks=Writing(tmp_path))
    everything = trainer.predict(Regression(), DataLoader(dataset(15), batch_size=4, num_workers=1))
    found: dict[int, float] = {}
    for rank in range(2):
        predictions, [indices] = torch.load(tmp_path / f"{rank}.pt")
        assert indices == [list(range(15))[first : first + 4] for first in range(4 * rank, 15, 8)]
        found.update(zip(chain(*indices), torch.cat(predictions).flatten().tolist(), strict=True))
    assert [found[index] for index in range(15)] == torch.cat(everything).flatten().tolist()


def test_exceptions_reach_the_caller() -> None:
    """The caller's callbacks get what `fit` raises, once."""
    seen: list[tuple[bool, BaseException]] = []
    callback = LambdaCallback(
        on_exception=lambda trainer, _, error: seen.append((trainer.interrupted, error))
    )
    trainer = quiet_trainer("ddp_fork", 2, max_epochs=1, callbacks=callback)
    with pytest.raises(WorkerRaisedError, match="the first failure") as caught:
        trainer.fit(Fails(1), loader(32, 4))
    assert seen == [(True, caught.value)]

"""The search of a learning rate: what it tries, what it suggests, and that it leaves no traces."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from rankwise import DataModule
from rankwise.callbacks import LambdaCallback, LearningRateCurve, LearningRateFinder, ModelCheckpoint
from rankwise.errors import ConfigurationError, InvalidArgumentError, MissingExtraError
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import (
    Line,
    Recording,
    WithTwoOptimizers,
    fitted,
    samples,
    trainer,
    without_package,
)
from tests.unit.trainer.helpers import loader as batches


class Noting(Recording):
    """Has an experiment, and a method that other loggers do not have."""

    @property
    def experiment(self) -> Any:
        return self.metrics

    def log_more(self, value: float) -> None:
        self.metrics.append((None, {"more": value}))


def loader(**options: Any) -> Any:
    """Return a loader of one batch, so that the loss shows the learning rate and not the samples."""
    return batches(8, 8, **options)


class Rising(Line):
    """Notes the learning rates that its steps have; has a scheduler, which a search leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs = False
        self.data: Any = samples()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        assert (self.logger is not None) == self.logs
        if self.logger is not None:
            self.logger.experiment.append(1)
            self.logger.log_more(2.0)  # type: ignore[attr-defined]  # of the test's logger

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def curve_of(finder: LearningRateFinder) -> LearningRateCurve:
    assert finder.optimal_lr is not None
    return finder.optimal_lr


def test_the_rates_of_a_search(tmp_path: Path) -> None:
    """They rise from the lowest to the highest, over several epochs, and the last steps may be left out."""
    finder = LearningRateFinder(1e-4, 1e-2, 10, early_stop_threshold=None, update_attr=False)
    fitted(tmp_path, Rising(), loader(), callbacks=finder, max_steps=2)
    curve = curve_of(finder)
    assert curve.results["lr"] == pytest.approx([1e-4 * 100 ** (part / 10) for part in (0, *range(2, 11))])
    assert len(curve.results["loss"]) == 10
    finder = LearningRateFinder(0.1, 1.1, 10, "linear", early_stop_threshold=None, update_attr=False)
    trainer(tmp_path, callbacks=finder).fit(Rising(), loader(), [])
    assert curve_of(finder).results["lr"] == pytest.approx([0.1, *(0.1 + part / 10 for part in range(2, 11))])
    finder = LearningRateFinder(1.0, 1e6, 50, update_attr=False)
    trainer(tmp_path, callbacks=finder).fit(Rising(), loader())
    losses = curve_of(finder).results["loss"]
    assert len(losses) < 50
    assert losses[-1] > 4 * min(losses)


def test_the_suggestion() -> None:
    """It is where the loss falls most steeply; losses that are not finite are left out."""
    curve = LearningRateCurve("exponential", 1e-3, 1.0, 6)
    curve.results = {"lr": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "loss": [9.0, 8.0, 4.0, math.nan, 3.9, 3.8]}
    assert curve.suggestion(0, 0) == 3.0
    assert curve.suggestion(2, 1) == 3.0
    assert curve.suggestion(4, 1) is None
    assert curve.suggestion() is None


def test_a_search_leaves_no_traces(tmp_path: Path) -> None:
    """But for the learning rate, the fit is as one without a search; loggers get that one alone."""
    results = []
    for finder in (None, LearningRateFinder(1e-3, 1.0, 20)):
        torch.manual_seed(5)
        logger, saving = Noting(), ModelCheckpoint(tmp_path / str(finder is None), save_top_k=-1)
        module = Rising()
        module.logs, module.lr = True, 0.1 if finder is None else 9.0
        options = {"log_every_n_steps": 1, "max_epochs": 2}
        callbacks: list[Any] = [saving] if finder is None else [finder, saving]
        train = trainer(tmp_path, callbacks=callbacks, logger=logger, **options)
        if finder is not None:
            finder.lr_find(train, module, loader(shuffle=True))
            assert module.lr == curve_of(finder).suggestion() != 9.0
            module.lr, train.callbacks = 0.1, [saving]
        train.fit(module, loader(shuffle=True), loader())
        files = sorted(path.name for path in Path(saving.dirpath or "").iterdir())
        weights, number = module.layer.weight.tolist(), torch.rand(1).item()
        results.append((weights, module.rates, files, logger.metrics, number))
    assert results[0] == results[1]


def test_the_fit_uses_it(tmp_path: Path) -> None:
    """`fit` searches first, and trains with the suggestion; one that continues keeps its learning rate."""
    finder, module = LearningRateFinder(1e-4, 1e-2, 20, attr_name="rate"), Rising()
    module.hparams = {"rate": 1.0}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), module.hparams["rate"])  # type: ignore[method-assign]
    train = fitted(tmp_path, module, loader(), callbacks=finder, max_epochs=1)
    curve = curve_of(finder)
    assert module.rates[0] == module.hparams["rate"] == curve.suggestion()
    train.max_epochs = 2
    train.fit(module, loader())
    assert finder.optimal_lr is curve
    searched = []
    for max_epochs in (1, 2):  # the first start of a run that looks for its last checkpoint searches
        finder = LearningRateFinder(1e-3, 1.0, 20)
        saving = ModelCheckpoint(tmp_path, save_last=True)
        options = {"callbacks": [finder, saving], "max_epochs": max_epochs}
        fitted(tmp_path, Rising(), loader(), ckpt_path="last", **options)
        searched.append(finder.optimal_lr is not None)
    assert searched == [True, False]


class Data(DataModule):
    """Has the training loader."""

    def train_dataloader(self) -> Any:
        return loader()


def test_a_search_without_a_fit(tmp_path: Path) -> None:
    """`lr_find` searches by itself, with a data module, without an attribute to set, and copies no data."""
    module, finder = Rising(), LearningRateFinder(num_training_steps=20, update_attr=False)
    finder.lr_find(trainer(tmp_path), module, datamodule=Data())
    assert (module.lr, len(finder.optimal_lr.results["lr"] if finder.optimal_lr else [])) == (0.1, 20)

    class Large(Dataset[Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise MemoryError

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return samples()[index]

    module = Rising()
    module.data = Large()
    module.net = nn.Identity()
    finder = LearningRateFinder(num_training_steps=20)
    trainer(tmp_path, callbacks=finder).fit(module, loader())
    assert len(curve_of(finder).results["lr"]) == 20


def test_no_suggestion(tmp_path: Path) -> None:
    """After too few steps the module keeps its learning rate; a trial run does not search; both are said."""
    module, finder = Rising(), LearningRateFinder()
    with pytest.warns(UserWarning, match="suggests no learning rate after 5 steps"):
        trainer(tmp_path, callbacks=LearningRateFinder(num_training_steps=5)).fit(module, loader())
    assert module.lr == 0.1
    with pytest.warns(UserWarning, match="does not search in a trial run"):
        trainer(tmp_path, callbacks=finder, fast_dev_run=True).fit(Rising(), loader())
    assert finder.optimal_lr is None


class WithLock(Line):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("module", "finder", "problem"),
    [
        (Line(), LearningRateFinder(attr_name="rate"), r"finds no learning rate(?s:.*)'rate'"),
        (WithTwoOptimizers(), LearningRateFinder(), "cannot step the optimizers of WithTwoOptimizers"),
        (WithLock(), LearningRateFinder(), "cannot copy WithLock"),
    ],
)
def test_refused(tmp_path: Path, module: Line, finder: LearningRateFinder, problem: str) -> None:
    """What cannot be searched is an error before anything is trained; a hook cannot search."""
    raises(ConfigurationError, problem, trainer(tmp_path, callbacks=finder).fit, module, loader())
    assert module.seen == []
    searching = LambdaCallback(on_train_epoch_start=LearningRateFinder().lr_find)
    with pytest.raises(ConfigurationError, match="called within a fit"):
        trainer(tmp_path, callbacks=searching).fit(Line(), loader())


@pytest.mark.parametrize(
    "options", [{"mode": "cosine"}, {"min_lr": 0.0}, {"min_lr": 2.0}, {"num_training_steps": 0}]
)
def test_wrong_values(options: dict[str, Any]) -> None:
    """Values that cannot work are refused in the constructor."""
    raises(InvalidArgumentError, None, LearningRateFinder, **options)


class Axes:
    """Notes what is drawn, as matplotlib's axes would draw it."""

    figure = "figure"

    def __init__(self) -> None:
        self.drawn: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.drawn.append((name, *arguments))


def test_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are drawn over the rates, with the suggestion; without matplotlib the extra is named."""
    curve, axes = LearningRateCurve("exponential", 1e-3, 1.0, 20), Axes()
    curve.results = {
        "lr": [1.0 * step for step in range(20)],
        "loss": [20.0 - step**2 / 20 for step in range(20)],
    }
    assert curve.plot(suggest=True, ax=axes) == "figure"
    assert axes.drawn[0] == ("plot", curve.results["lr"], curve.results["loss"])
    assert axes.drawn[1] == ("set_xscale", "log")
    assert axes.drawn[-1] == ("plot", curve.suggestion(), curve.results["loss"][18])
    without_package(monkeypatch, "matplotlib")
    raises(MissingExtraError, r"rankwise\[plot\]", curve.plot)

"""Validation, test and prediction."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.errors import LifecycleError
from rankwise.trainer.loops.evaluation import interleaved
from tests.unit.trainer.helpers import Line, loader, samples, trainer


def test_samples_count_alike(tmp_path: Path) -> None:
    """The mean weighs batches by their size, so a short last batch does not count more."""
    model = Line()
    [metrics] = trainer(tmp_path).test(model, loader(7, batch_size=4))
    x, y = samples(7).tensors
    assert metrics == {"test_loss": pytest.approx(model.loss([x, y]).item())}


@pytest.mark.parametrize(("reduce_fx", "expected"), [("sum", 9), ("min", 2), ("max", 4)])
def test_reductions(tmp_path: Path, reduce_fx: str, expected: float) -> None:
    """Sums and extremes are over batches."""

    class Counting(Line):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("size", float(4 - (batch_idx > 0)) - (batch_idx > 1), reduce_fx=reduce_fx)

    assert trainer(tmp_path).test(Counting(), loader(6)) == [{"size": expected}]


def test_several_loaders(tmp_path: Path) -> None:
    """Each loader has its metrics, or its list of predictions, and the step is told which it is."""

    class Several(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("index", float(dataloader_idx))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return (dataloader_idx, batch_idx)

    train, loaders = trainer(tmp_path), [loader(4), loader(2)]
    metrics = [{"index/dataloader_idx_0": 0.0}, {"index/dataloader_idx_1": 1.0}]
    assert train.validate(Several(), loaders) == metrics
    assert train.predict(Several(), loaders) == [[(0, 0), (0, 1)], [(1, 0)]]


def test_end_of_epoch_can_log(tmp_path: Path) -> None:
    """What is logged after the batches is part of the result."""

    class Late(Line):
        def on_test_epoch_end(self) -> None:
            self.log("late", 3.0)

    [metrics] = trainer(tmp_path).test(Late(), loader(4))
    assert metrics["late"] == 3.0


def test_phases(tmp_path: Path) -> None:
    """The trainer says what it is doing, and afterwards that it does nothing."""

    class Asking(Line):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.testing
            assert not self.training

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.trainer.predicting
            return torch.ones(1)

    train = trainer(tmp_path)
    train.test(Asking(), loader(4))
    train.predict(dataloaders=loader(4))
    assert not any([train.training, train.validating, train.testing, train.predicting, train.is_fitting])


def test_predictions_in_order(tmp_path: Path) -> None:
    """What predict_step returned, batch by batch."""
    predictions = trainer(tmp_path).predict(Line(), loader(7))
    assert [len(batch) for batch in predictions] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(predictions), samples(7).tensors[0][:, 0])


def test_limits(tmp_path: Path) -> None:
    """Each stage has its limit."""
    train = trainer(tmp_path, limit_predict_batches=3, limit_test_batches=0.5)
    assert len(train.predict(Line(), loader())) == 3
    train.test(dataloaders=loader())
    assert train.num_test_batches == [2]


def test_interleaved() -> None:
    """The inverse of dealing out, also where some ranks have nothing."""
    assert interleaved([[0, 4], [1], [2], [3]]) == [0, 1, 2, 3, 4]
    assert interleaved([[0], [], []]) == [0]
    mixed: list[list[Any]] = [[None, 2], [1]]
    assert interleaved(mixed) == [None, 1, 2]


def test_no_module_yet(tmp_path: Path) -> None:
    """Without a module, now or before, there is nothing to evaluate."""
    with pytest.raises(LifecycleError, match=r"trainer\.fit"):
        trainer(tmp_path).test(dataloaders=loader())


@pytest.mark.parametrize("options", [{}, {"return_predictions": False}])
def test_predictions_of_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """A predict_step that returns nothing is told, where the predictions were asked for."""

    class Silent(Line):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path).predict(Silent(), loader(4), **options)
    texts = [str(each.message) for each in caught]
    assert texts == ["Silent.predict_step() returned None for every batch."] * (not options)

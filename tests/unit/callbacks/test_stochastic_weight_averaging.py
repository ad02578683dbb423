"""Averaging the last epochs, at a learning rate of their own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.callbacks import StochasticWeightAveraging
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from tests.helpers.raising import raises
from tests.unit.callbacks.test_weight_averaging import Noted
from tests.unit.trainer.helpers import fitted, whole_and_continued


class Scheduled(Noted):
    """Has a scheduler, and notes the rate of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_the_last_epochs(tmp_path: Path) -> None:
    """The weights at the start of each of the last epochs are averaged; the rate anneals to swa_lrs."""
    module = Scheduled()
    averaging = StochasticWeightAveraging(0.02, 3, annealing_epochs=2, annealing_strategy="linear")
    train = fitted(tmp_path, module, callbacks=averaging, max_epochs=5)
    torch.testing.assert_close(module.layer.weight.detach(), torch.stack(module.trained[7:16:4]).mean(0))
    assert module.rates == pytest.approx([0.1, 0.05, 0.025, 0.0225, 0.02])
    assert [type(config.scheduler).__name__ for config in train.lr_scheduler_configs] == ["StepLR"]


def test_fraction() -> None:
    """A float is a part of max_epochs; epochs count from 1. Wrong values are refused in the constructor."""
    assert StochasticWeightAveraging(0.1).swa_start(10) == 7
    assert StochasticWeightAveraging(0.1, 0.0).swa_start(10) == 0
    assert StochasticWeightAveraging(0.1, 3).swa_start(10) == 2
    wrong: list[dict[str, Any]] = [{"swa_lrs": rates} for rates in (0, [], [0.1, 0])]
    wrong += [{"swa_epoch_start": start} for start in (0, 1.5)]
    wrong += [{"annealing_epochs": -1}, {"annealing_strategy": "steps"}]
    for options in wrong:
        raises(InvalidArgumentError, None, StochasticWeightAveraging, **{"swa_lrs": 0.1, **options})
    with pytest.raises(InvalidTypeError):
        StochasticWeightAveraging(0.1, avg_fn="mean")  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_run_that_continues(tmp_path: Path, epoch: int) -> None:
    """Average and rates go on from a checkpoint of before or after the start, to the same weights."""
    averaging = partial(StochasticWeightAveraging, [0.02], 2, annealing_epochs=3)
    whole, continued = whole_and_continued(tmp_path, Scheduled, averaging, epoch, max_epochs=4)
    assert continued.rates == whole.rates[epoch + 1 :]
    assert continued.layer.weight.tolist() == whole.layer.weight.tolist()


class Normalised(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


class Manual(Scheduled):
    automatic_optimization = False


class Two(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


def averaged(folder: Path, module: Noted, *arguments: Any, max_epochs: int = 2) -> None:
    """Fit with the callback."""
    fitted(folder, module, callbacks=StochasticWeightAveraging(*arguments), max_epochs=max_epochs)


def test_refused(tmp_path: Path) -> None:
    """Endless training, several optimizers, a wrong number of rates; batch normalisation gets a warning."""
    with pytest.raises(ConfigurationError, match="needs a number of epochs"):
        averaged(tmp_path, Scheduled(), 0.1, max_epochs=-1)
    raises(ConfigurationError, "needs one optimizer", averaged, tmp_path, Two(), 0.1, max_epochs=1)
    with pytest.raises(ConfigurationError, match="a scheduler that the module steps itself"):
        averaged(tmp_path, Manual(), 0.1, max_epochs=1)
    with pytest.raises(InvalidArgumentError, match="one for each of 1 parameter groups"):
        averaged(tmp_path, Scheduled(), [0.1, 0.2], 1)
    with pytest.warns(UserWarning, match="update_bn"):
        averaged(tmp_path, Normalised(), 0.1, 1)

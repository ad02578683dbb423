"""The options of `log`, and the lines that loggers get: those of Lightning 2.6 for the same module."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

from rankwise.callbacks import LearningRateMonitor
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, UnknownNameError
from rankwise.loggers import CSVLogger
from rankwise.trainer.metrics.options import ranks_of_group
from tests.unit.trainer.helpers import Line, fitted, loader, trainer

Log = Callable[["Logging", str, int], None]
Row = dict[str, float]


class Logging(Line):
    """Logs what `log(module, "train" or "val", the batch's number)` logs."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log_batch = log
        self.train_sum, self.val_sum = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_batch(self, "train", batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_batch(self, "val", batch_idx)


class ByHand(Logging):
    """Steps two optimizers in each batch."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        return [torch.optim.SGD(parameters, 0.1), torch.optim.Adam(parameters, 0.1)]


def rows(
    folder: Path, log: Log, kind: type[Logging] = Logging, loaders: int = 1, **options: Any
) -> list[Row]:
    """Fit four batches, validate three of each loader within it and once after it; return the lines."""
    validation: list[DataLoader[Any]] = [loader(6)] * loaders
    module, options = kind(log), {"log_every_n_steps": 1, **options}
    train = fitted(folder, module, loader(), validation, logger=CSVLogger(folder), **options)
    train.validate(module, validation)
    with (Path(train.log_dir or "") / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def line(epoch: float, step: float, **values: float) -> Row:
    return {"epoch": epoch, "step": step, **values}


def by_default(module: Logging, phase: str, batch_idx: int) -> None:
    module.log(phase, float(batch_idx))


def test_steps_are_numbered_from_0(tmp_path: Path) -> None:
    """A step's line has the number of the steps before it; a validation has that of the step before it."""
    found = rows(tmp_path, by_default, max_epochs=2)
    first, second = ([line(epoch, 4 * epoch + step, train=step) for step in range(4)] for epoch in (0, 1))
    assert found == [*first, line(0, 3, val=1), *second, line(1, 7, val=1), line(2, 8, val=1)]


def test_intervals(tmp_path: Path) -> None:
    """Every n-th step is logged, and validations within an epoch."""
    found = rows(tmp_path, by_default, log_every_n_steps=3, val_check_interval=2)
    assert found == [line(0, 1, val=1), line(0, 2, train=2), line(0, 3, val=1), line(1, 4, val=1)]
    accumulated = rows(tmp_path / "accumulated", by_default, accumulate_grad_batches=2)
    assert accumulated == [line(0, 0, train=1), line(0, 1, train=3), line(0, 1, val=1), line(1, 2, val=1)]


def test_manual_optimisation(tmp_path: Path) -> None:
    """A batch counts once, however many optimizers it steps, also for the learning rates."""
    found = rows(tmp_path, by_default, ByHand, log_every_n_steps=3, callbacks=LearningRateMonitor())
    rates = [{"step": step, "lr-SGD": 0.1, "lr-Adam": 0.1} for step in (0, 2)]
    assert found == [*rates, line(0, 2, train=2), line(0, 3, val=1), line(1, 4, val=1)]


def test_steps_of_evaluations(tmp_path: Path) -> None:
    """What an evaluation logs by step has a line for each batch, numbered over all of its kind.

    Of several loaders the number is the end of the name, and steps are counted for each loader.
    """

    def log(module: Logging, phase: str, batch_idx: int) -> None:
        module.log(phase, float(batch_idx), on_step=phase == "val", on_epoch=True)

    both = rows(tmp_path, log, max_epochs=2)
    steps = [{"step": step, "val_step": step % 3} for step in range(6)]
    assert [row for row in both if "val_step" in row] == [*steps, *steps[:3]]
    epochs = [line(epoch, step, val_epoch=1) for epoch, step in ((0, 3), (1, 7), (2, 8))]
    assert [row for row in both if "val_epoch" in row] == epochs
    found = rows(tmp_path, log, loaders=2)
    of_second = [row for row in found if "val_step/dataloader_idx_1" in row]
    assert [row["step"] for row in of_second] == [0, 1, 2, 0, 1, 2]
    assert {"epoch", "step", "val_epoch/dataloader_idx_0", "val_epoch/dataloader_idx_1"} in map(set, found)


def test_numbers_of_the_users_own(tmp_path: Path) -> None:
    """Values with the names "step" and "epoch" replace the numbers of step and epoch."""

    def log(module: Logging, phase: str, batch_idx: int) -> None:
        module.log_dict({"step": 100.0 + batch_idx, "epoch": 50.0, phase: 1.0})

    found = rows(tmp_path, log)
    assert found[:4] == [line(50, 100 + number, train=1) for number in range(4)]
    assert found[4:] == [line(50, 101, val=1)] * 2


@pytest.mark.parametrize("is_called", [True, False])
def test_metric_objects_by_step(is_called: bool, tmp_path: Path) -> None:
    """A metric object that is called with the batch has a step's value, and by default only that."""

    def log(module: Logging, phase: str, batch_idx: int) -> None:
        metric = module.train_sum if phase == "train" else module.val_sum
        (metric if is_called else metric.update)(batch_idx + 1.0)
        module.log(phase, metric)
        module.log(f"{phase}2", metric, on_epoch=True, prog_bar=True)

    found = rows(tmp_path, log)
    steps = [line(0, step, train=step + 1, train2_step=step + 1) for step in range(4)] if is_called else []
    values = {"train2_epoch": 10.0} if is_called else {"train2_epoch": 10.0, "train": 10.0}
    assert found == [*steps, line(0, 3, val=6, val2=6), line(0, 3, **values), line(1, 4, val=6, val2=6)]


def test_metric_objects_without_a_value_of_the_step(tmp_path: Path) -> None:
    """A step's value that is asked for and does not exist is said, and an error if nothing else is logged."""

    def log(module: Logging, phase: str, batch_idx: int, on_epoch: bool = True) -> None:
        module.train_sum.update(1.0)
        module.log("sum", module.train_sum, on_step=True, on_epoch=on_epoch)

    with pytest.warns(UserWarning, match="has no value of this step: call the SumMetric"):
        trainer(tmp_path).fit(Logging(log), loader())
    with pytest.raises(ConfigurationError, match="has no value of this step"):
        trainer(tmp_path).fit(Logging(lambda m, phase, i: log(m, phase, i, on_epoch=False)), loader())


class OneName(Line):
    """Logs the number of the loader's batches, under one name for all loaders or a name for each."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = self.name.format(dataloader_idx)
        self.log(name, 1.0, reduce_fx="sum", add_dataloader_idx=False)


def test_add_dataloader_idx(tmp_path: Path) -> None:
    """Without the number of the loader, each loader needs a name of its own."""
    loaders = [loader(6), loader(4)]
    assert trainer(tmp_path).validate(OneName("count{}"), loaders) == [{"count0": 3.0}, {"count1": 2.0}]
    with pytest.raises(ConfigurationError, match="values of several loaders under one name"):
        trainer(tmp_path).validate(OneName("count"), loaders)


def test_numpy_scalars(tmp_path: Path) -> None:
    """NumPy's numbers can be logged, its arrays and truth values cannot, as in Lightning."""
    numpy = pytest.importorskip("numpy")
    values = [numpy.float32(0.5), numpy.float16(2), numpy.int64(3)]

    def log(module: Logging, phase: str, batch_idx: int) -> None:
        module.log_dict({str(number): value for number, value in enumerate(values)})

    train = fitted(tmp_path, Logging(log))
    found = {name: value.item() for name, value in train.callback_metrics.items()}
    assert found == {"0": 0.5, "1": 2, "2": 3}
    for value in (numpy.array(1.0), numpy.bool_(True), 1j):
        values[:] = [value]
        with pytest.raises(InvalidTypeError, match="a number, or a tensor with one element"):
            train.validate(Logging(log), loader())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("avg", 1.5), ("SUM", 6.0), (torch.max, 3.0), (min, 0.0)),
        *((torch.mean, 1.5), (torch.sum, 6.0), (max, 3.0)),
    ],
)
def test_reductions(given: Any, expected: float, tmp_path: Path) -> None:
    """A reduction has Lightning's names, or is a function of that name; others are refused, as there."""
    logging = Logging(lambda m, _, i: m.log("x", float(i), on_epoch=True, reduce_fx=given))
    train = fitted(tmp_path, logging)
    assert train.callback_metrics["x_epoch"] == expected
    unknown_ones = {torch.std: "std", torch.median: "median", "prod": "prod", "meen": "Did you mean 'mean'"}
    for unknown, words in {**unknown_ones, (lambda values: values.mean()): "lambda"}.items():
        with pytest.raises(UnknownNameError, match=rf"reduce_fx(?s:.*){words}"):
            train.validate(Logging(lambda m, p, i, to=unknown: m.log("x", 1.0, reduce_fx=to)), loader())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"on_step": False, "on_epoch": False}, ConfigurationError, "would log nothing"),
        ({"rank_zero_only": True, "sync_dist": True}, ConfigurationError, "counts global rank 0 only"),
        ({"sync_dist_group": object(), "sync_dist": False}, ConfigurationError, "does not reduce over ranks"),
        ({"enable_graph": True}, InvalidArgumentError, "enable_graph=True"),
        ({"metric_attribute": "layer"}, InvalidArgumentError, "metric_attribute='layer'"),
    ],
)
def test_options_without_effect(
    options: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    """Options that contradict or have no effect are refused by name; so is a group without this rank."""
    with pytest.raises(error, match=text):
        trainer(tmp_path).validate(Logging(lambda module, _, i: module.log("x", 1.0, **options)), loader())
    with pytest.raises(ConfigurationError, match="this rank is not part of"):
        ranks_of_group("x", torch.distributed.GroupMember.NON_GROUP_MEMBER)

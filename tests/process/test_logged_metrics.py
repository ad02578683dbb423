"""Logged numbers and metric objects on several ranks: the values of one process, also after a resumption."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torchmetrics.wrappers import MinMaxMetric, Running

from rankwise.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from rankwise.data import shard_info
from rankwise.errors import CheckpointError, ConfigurationError, WorkerRaisedError
from rankwise.loggers import CSVLogger
from rankwise.trainer import Trainer
from tests.helpers.parameters import first
from tests.process.training_tasks import FEATURES, Regression, dataset, loader, saving_each_step, trainer_on

RANKS = (2, 3)


def evaluated(world_size: int, module: Regression, samples: int, batch_size: int) -> dict[str, float]:
    return dict(trainer_on(world_size).test(module, loader(samples, batch_size))[0])


def fitted(
    size: int, module: Regression, train: Any, val: Any = None, *, path: Any = None, **options: Any
) -> Trainer:
    trainer = trainer_on(size, **options)
    trainer.fit(module, train, val, ckpt_path=path)
    return trainer


def metrics_of(trainer: Trainer) -> dict[str, float]:
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


class Composed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.root = self.error**0.5
        worst: Any = MinMaxMetric(torchmetrics.MeanAbsoluteError().set_dtype(torch.float64))
        self.worst, self.worst_value = worst, worst["max"]
        self.both = torchmetrics.MetricCollection(
            {"r2": torchmetrics.R2Score(), "explained": torchmetrics.ExplainedVariance()}, prefix="of_"
        ).set_dtype(torch.float64)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        predicted = self(batch[0])
        self.error.update(predicted, batch[1])
        self.log_dict({"error": self.error, "root": self.root, "worst": self.worst_value})
        self.log_dict(self.both)  # before the update, whose values must count too
        self.worst.update(predicted, batch[1])
        self.both.update(predicted, batch[1])


class OfTargets(Regression):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.metric.update(batch[1])
        self.log("value", self.metric)

    validation_step = test_step


@pytest.mark.parametrize("samples", [20, 22, 25])
def test_running_metrics(samples: int) -> None:
    """The window is that of one process with the batches of all ranks, also where some have fewer batches."""
    modules = [OfTargets(Running(torchmetrics.MeanMetric(), 3)) for _ in range(2)]
    assert evaluated(2, modules[0], samples, 2) == pytest.approx(
        evaluated(1, modules[1], samples, 4), abs=1e-6
    )


class OfPredictions(OfTargets):
    """Calls a metric object with predictions that require gradients."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        predicted = self(batch[0])
        self.metric(predicted.flatten(), batch[1].flatten())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(predicted, batch[1])


def test_differentiable_metric_objects() -> None:
    """A metric object that is called with predictions that require gradients is computed as others."""
    modules = [OfPredictions(torchmetrics.MeanSquaredError().set_dtype(torch.float64)) for _ in range(2)]
    alone, together = (
        fitted(size, module, loader(16, 4 // size), max_epochs=2) for size, module in enumerate(modules, 1)
    )
    assert metrics_of(alone)["metric"] == pytest.approx(metrics_of(together)["metric"], abs=1e-12)


class Pieces(torchmetrics.Metric):
    pieces: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pieces", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        for count, value in enumerate(values.flatten(), 1):
            self.pieces.append(value.repeat(count))

    def compute(self) -> Tensor:
        return torch.stack([len(piece) * piece[0] for piece in self.pieces]).sum()


@pytest.mark.parametrize(
    ("make", "samples", "batch_size"),
    [
        pytest.param(Composed, 19, 2, marks=pytest.mark.quick),
        *((lambda: OfTargets(Pieces()), samples, 1) for samples in (5, 2)),
    ],
)
def test_metric_objects_of_all_ranks(make: Callable[[], Regression], samples: int, batch_size: int) -> None:
    """Composed, wrapped and collected ones count all samples; lists of ranks may have any length."""
    expected = evaluated(1, make(), samples, batch_size)
    if make is Composed:
        assert expected["root"] == pytest.approx(expected["error"] ** 0.5)
    for world_size in RANKS:
        assert evaluated(world_size, make(), samples, batch_size) == pytest.approx(expected, abs=1e-12)


class OverSomeRanks(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def setup(self, stage: str) -> None:
        first, second = (torch.distributed.new_group(ranks) for ranks in ([0, 2], [1]))
        self.group = second if self.global_rank == 1 else first

    def teardown(self, stage: str) -> None:
        del self.group

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            self.log("only", 10.0 + batch_idx, rank_zero_only=True, on_epoch=True)
        rank = float(self.global_rank)
        self.log("grouped", rank, sync_dist=True, sync_dist_group=self.group, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("size", float(len(batch[0])), on_step=True, sync_dist=True, reduce_fx="sum")
        self.log("own", float(self.global_rank), on_step=True)

    def on_train_end(self) -> None:
        found = self.trainer.callback_metrics
        values = {name: found[name].item() for name in ("only_epoch", "grouped_epoch")}
        self.seen = self.trainer.strategy.all_gather_object(values)


def test_values_of_some_ranks(tmp_path: Path) -> None:
    """Ranks get, and decide by, rank 0's value and their group's; a batch has that of ranks that have it."""
    saving = ModelCheckpoint(tmp_path, monitor="only", mode="max", save_top_k=1)
    logger = CSVLogger(tmp_path)
    callbacks = [EarlyStopping("only_epoch", mode="max", patience=1), saving]
    options: Any = {"callbacks": callbacks, "enable_checkpointing": True, "log_every_n_steps": 1}
    module = OverSomeRanks()
    trainer = fitted(3, module, loader(12, 2), loader(14, 2), max_epochs=3, logger=logger, **options)
    assert trainer.current_epoch == 2  # after the first epoch without a better value
    assert module.seen == [{"only_epoch": 10.5, "grouped_epoch": 1.0}] * 3
    assert float(saving.best_model_score or 0) == 10.5
    found = [*csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())]
    assert [row["size_step"] for row in found if row["size_step"]] == ["6.0", "6.0", "2.0"] * 2
    assert {row["own_step"] for row in found if row["own_step"]} == {"0.0"}


# ------------------------------------------------------------------------------------------ checkpoints


class Measured(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.samples = torchmetrics.SumMetric().set_dtype(torch.float64)
        self.targets = torchmetrics.CatMetric().set_dtype(torch.float64)
        self.recent = Running(torchmetrics.SumMetric(), window=3)
        self.ever = torchmetrics.SumMetric().set_dtype(torch.float64)
        self.range = MinMaxMetric(torchmetrics.MeanMetric().set_dtype(torch.float64))
        self.errors = torchmetrics.MetricCollection(  # which share their states
            {"mse": torchmetrics.MeanSquaredError(), "rmse": torchmetrics.MeanSquaredError(squared=False)}
        ).set_dtype(torch.float64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        for metric in (self.samples, self.ever, self.recent):
            metric.update(float(len(batch[0])))
        self.targets.update(batch[1])
        self.range.update(batch[1])
        self.errors.update(self(batch[0]).detach(), batch[1])
        self.log_dict({"samples": self.samples, "recent": self.recent})
        self.log_dict(self.errors)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("targets", self.targets.compute().sum())
        self.targets.reset()
        self.log("ever", self.ever.compute())
        self.log("max", self.range.compute()["max"])
        self.range.reset()


@pytest.mark.parametrize("world_size", [1, 2])
def test_metric_objects_are_in_checkpoints(world_size: int, tmp_path: Path) -> None:
    """A run that is resumed within an epoch, or before its end, has the metrics of the run that was not."""
    batches = loader(24, 6 // world_size)
    whole = fitted(world_size, Measured(), batches, max_epochs=2, **saving_each_step(tmp_path))
    assert metrics_of(whole)["samples"] == 24
    for step in (2, 4, 6, 8):
        path = tmp_path / f"step={step}.ckpt"
        resumed = fitted(world_size, Measured(), batches, max_epochs=2, path=path)
        assert metrics_of(resumed) == pytest.approx(metrics_of(whole), abs=1e-12), step


@pytest.mark.soak
def test_metric_objects_of_other_world_sizes(tmp_path: Path) -> None:
    """The ranks of a run that continues share the states of all ranks before."""
    whole = fitted(3, Measured(), loader(24, 2), max_epochs=1, **saving_each_step(tmp_path))
    path = tmp_path / "step=2.ckpt"
    for world_size in (1, 2, 4):
        batches = loader(24, 6 // world_size)
        resumed = fitted(world_size, Measured(), batches, max_epochs=1, path=path)
        assert metrics_of(resumed)["samples"] == 24, world_size
        assert metrics_of(resumed)["targets"] == pytest.approx(metrics_of(whole)["targets"], abs=1e-5)


def test_states_that_no_rank_can_continue(tmp_path: Path) -> None:
    """A rank cannot continue two ranks' states that have no common one; the error names the metric object."""
    # torchmetrics can only put its states together for the final value.
    modules = [OfPredictions(torchmetrics.PearsonCorrCoef().set_dtype(torch.float64)) for _ in range(2)]
    fitted(2, modules[0], loader(24, 3), max_epochs=1, **saving_each_step(tmp_path))
    with pytest.raises(CheckpointError, match="'metric'"):
        fitted(1, modules[1], loader(24, 6), max_epochs=1, path=tmp_path / "step=2.ckpt")


def test_checkpoints_within_a_validation(tmp_path: Path) -> None:
    """A run that continues from there validates again, and counts each sample once."""
    path, batches = tmp_path / "within.ckpt", (loader(8, 2), loader(6, 2))
    save = LambdaCallback(on_validation_batch_end=lambda trainer, *details: trainer.save_checkpoint(path))
    fitted(1, OfTargets(torchmetrics.SumMetric()), *batches, max_epochs=1, callbacks=save)
    trainer = fitted(1, OfTargets(torchmetrics.SumMetric()), *batches, max_epochs=1, path=path)
    assert metrics_of(trainer)["value"] == pytest.approx(dataset(6).tensors[1].sum().item(), abs=1e-5)


# ------------------------------------------------------------------------------------------ step values


class ReadsItsMetrics(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[float]] = []
        self.losses: list[float] = []
        self.val_losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx:
            value = self.trainer.callback_metrics["mean"].item()
            self.steps.append(self.trainer.strategy.all_gather_object(value))
        self.log("mean", batch[1].mean(), sync_dist=True)
        if batch_idx % 3 == 1:
            self.log("sometimes", 1.0, sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["train_loss_epoch"].item())

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(self.trainer.callback_metrics["val_loss"].item())
        self.log("best", min(self.val_losses))


def test_values_that_hooks_read_are_those_of_one_process() -> None:
    """With `sync_dist=True` every rank has the value of the global batch after every step.

    At the end of an epoch hooks read its metrics, reduced over the ranks, and may log more.
    """
    read = []
    for world_size in (1, 2):
        model = ReadsItsMetrics()
        loaders = loader(24, 4 // world_size), loader(16, 8)
        metrics = metrics_of(fitted(world_size, model, *loaders, max_epochs=2))
        assert all(len(set(values)) == 1 for values in model.steps)
        assert metrics["sometimes"] == world_size
        assert len(model.losses) == len(model.val_losses) == 2
        assert metrics["best"] == pytest.approx(min(model.val_losses))
        assert [model.losses[-1], model.val_losses[-1]] == [metrics["train_loss_epoch"], metrics["val_loss"]]
        read.append([[values[0] for values in model.steps], model.losses, model.val_losses])
    for alone, together in zip(*read, strict=True):
        assert alone == pytest.approx(together, abs=1e-12)


class OnRankZero(Regression):
    first = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 0 or batch_idx < self.first:
            self.log("mean", batch[1].mean(), sync_dist=True)
        return nn.functional.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("first", [0, 1])
def test_step_values_of_some_ranks(first: int) -> None:
    """A step value that only one rank logs is an error on all ranks, in any step, not a deadlock."""
    module = OnRankZero()
    module.first = first
    with pytest.raises(WorkerRaisedError, match="not all logged \\['mean'\\]"):
        fitted(2, module, loader(24, 2), max_epochs=1)


class Spoilt(Regression):
    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad = bad

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        targets = torch.where(batch[1] == self.bad, torch.nan, batch[1])
        for reduce_fx in ("min", "max"):
            self.log(reduce_fx, getattr(targets, reduce_fx)(), reduce_fx=reduce_fx, sync_dist=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.test_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("place", first(2, range(4)))
def test_nan_among_extremes(place: int) -> None:
    """The extremes are NaN wherever the NaN is: on either rank, in the first batch or the last."""
    module = Spoilt(float(dataset(4).tensors[1][place]))
    one_step = loader(4, 2)  # on all samples
    for found in (evaluated(2, module, 4, 1), metrics_of(fitted(2, module, one_step, max_steps=1))):
        assert all(math.isnan(found[name]) for name in ("min", "max"))


# ------------------------------------------------------------------------------------------ batch sizes


@dataclass
class Batch:
    x: Tensor
    y: Tensor


def in_lists(samples: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [x for x, _ in samples], [y for _, y in samples]


def as_dataclass(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    return Batch(*map(torch.stack, in_lists(samples)))


def with_words(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Collate into a dictionary whose first entry has no samples."""
    return {"split": "test", "x": torch.stack([x for x, _ in samples]), "y": [y for _, y in samples]}


def features_first(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(part, dim=1) for part in in_lists(samples))


class AnyShape(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        batch = vars(batch) if isinstance(batch, Batch) else batch
        batch = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        x, y = (torch.stack(part) if isinstance(part, list) else part for part in batch)
        if x.shape[1] != FEATURES:
            x, y = x.T, y.T
        self.log("error", nn.functional.mse_loss(self(x), y))


def check_mean(world_size: int, data: Any = None, **options: Any) -> None:
    """Compare the mean of seven samples with one that is computed by hand."""
    with torch.no_grad():
        inputs, targets = dataset(7).tensors
        expected = nn.functional.mse_loss(Regression()(inputs), targets).item()
    [found] = trainer_on(world_size).test(AnyShape(), DataLoader(data or dataset(7), **options))
    assert found["error"] == pytest.approx(expected, abs=1e-12), (world_size, options)


class Stream(IterableDataset[Any]):
    shards_itself = True

    def __iter__(self) -> Any:
        place = shard_info()
        return iter([dataset(7)[number] for number in range(place.shard_index, 7, place.num_shards)])


@pytest.mark.parametrize("collate", first(2, [as_dataclass, with_words, features_first, in_lists]))
def test_means_of_batches_of_all_shapes(collate: Callable[[Any], Any]) -> None:
    """A mean counts each sample once, whatever the batches look like, with and without workers."""
    for world_size, workers in ((1, 0), (2, 0), (2, 2), (3, 0)):
        check_mean(world_size, batch_size=4, collate_fn=collate, num_workers=workers)


def test_means_of_a_users_own_batches() -> None:
    """A batch sampler of the user's counts its own batches; workers may return batches in any order."""
    sampler = BatchSampler(SequentialSampler(dataset(7)), 4, drop_last=False)
    for world_size in (1, 2):
        check_mean(world_size, batch_sampler=sampler, collate_fn=as_dataclass)
    for collate in (None, as_dataclass):
        check_mean(2, batch_size=2, num_workers=2, in_order=False, collate_fn=collate)


@pytest.mark.quick
def test_means_over_iterable_data() -> None:
    """Iterable data has no indices: the samples that come to the collate function count, with workers too."""
    for world_size, workers in ((1, 0), (2, 0), (2, 2)):
        for collate in (None, as_dataclass):
            check_mean(world_size, Stream(), batch_size=2, collate_fn=collate, num_workers=workers)


class Reloading(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (tuple(part[:2] for part in batch) for batch in super().__iter__())


def test_sizes_that_nobody_knows() -> None:
    """Batches that are made otherwise need `batch_size` in a mean."""
    ready = TensorDataset(torch.zeros(3, 4, FEATURES).double(), torch.zeros(3, 4, 1).double())
    loaders = (Reloading(dataset(7), batch_size=4), DataLoader(ready, batch_size=None), [dataset(7)[:4]])
    for batches in loaders:
        with pytest.raises(ConfigurationError, match=r"log\('error'(.|\n)*batch_size="):
            trainer_on(1).test(AnyShape(), batches)


def readable(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Put together the samples with a positive first feature: the others cannot be read."""
    left: list[Tensor] = torch.utils.data.default_collate([sample for sample in samples if sample[0][0] > 0])
    return left


class Counting(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", batch[0][:, 0].mean(), batch_size=len(batch[0]))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.quick), 3])
def test_samples_that_a_collate_function_leaves_out(world_size: int) -> None:
    """The mean of a metric is refused, which says to give the number of samples: then it is right."""
    batches: DataLoader[Any] = DataLoader(dataset(24), 8, collate_fn=readable)
    with pytest.raises((ConfigurationError, WorkerRaisedError), match=r"log\('error'(.|\n)*batch_size="):
        trainer_on(world_size).test(AnyShape(), batches)
    [found] = trainer_on(world_size).test(Counting(), batches)
    first = dataset(24).tensors[0][:, 0]
    assert found["error"] == pytest.approx(first[first > 0].mean().item(), abs=1e-12)

"""Evaluation and prediction on any number of ranks use each sample once, in order, as one process does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from rankwise.callbacks import LambdaCallback
from rankwise.data import shard_info
from rankwise.errors import WorkerRaisedError
from tests.helpers.parameters import first
from tests.process.training_tasks import FEATURES, Regression, dataset, loader, trainer_on

SAMPLES = 1003


class Median(torchmetrics.Metric):
    """Keeps all that it has seen, in a list."""

    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torchmetrics.utilities.dim_zero_cat(self.values).median()


class Measured(Regression):
    """Logs numbers, and metric objects of every way in which states are reduced."""

    def __init__(self) -> None:
        super().__init__()
        metrics: dict[str, torchmetrics.Metric] = {
            "error": torchmetrics.MeanSquaredError(),
            "spread": torchmetrics.PearsonCorrCoef(),
            "biggest": torchmetrics.MaxMetric(),
            "median": Median(),
        }
        self.metrics = nn.ModuleDict({name: each.set_dtype(torch.float64) for name, each in metrics.items()})

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        values = (self(batch[0]).squeeze(-1), batch[1].squeeze(-1))
        for name in self.metrics:
            metric: Any = self.metrics[name]
            metric.update(*values[: 2 if name in ("error", "spread") else 1])
            self.log(name, metric)


def loaders() -> dict[str, DataLoader[Any]]:
    """Return a loader for each way to give samples."""
    data = dataset(SAMPLES)
    own = BatchSampler(SequentialSampler(data), 50, drop_last=False)
    return {
        "plain": DataLoader(data, batch_size=32),
        "shuffled": DataLoader(data, batch_size=7, shuffle=True),
        "dropping": DataLoader(data, batch_size=100, drop_last=True),
        "batch sampler": DataLoader(data, batch_sampler=own),
    }


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.quick), *list(loaders())[1:]])
def test_each_sample_counts_once(kind: str) -> None:
    """1,003 samples on one to four ranks give the same metrics to 1e-9, metric objects included."""
    [expected] = trainer_on(1).test(Measured(), loaders()[kind])
    assert expected["samples"] == (1000 if kind == "dropping" else SAMPLES)
    for world_size in (2, 3, 4) if kind == "plain" else (3,):
        [found] = trainer_on(world_size).test(Measured(), loaders()[kind])
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


def test_predictions_in_order() -> None:
    """1,003 samples on one to four ranks give the same predictions in the same order."""
    expected = trainer_on(1).predict(Regression(), loaders()["plain"])
    for world_size in (2, 3, 4):
        found = trainer_on(world_size).predict(Regression(), loaders()["plain"])
        assert len(found) == len(expected)
        torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=1e-12)


class Split(Regression):
    """Splits its data itself, by a sampler that pads and shuffles."""

    def test_dataloader(self) -> DataLoader[Any]:
        data = dataset(10)
        return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), 2, False))

    predict_dataloader = test_dataloader


def test_a_distributed_sampler_of_the_users() -> None:
    """Ten samples on three ranks: each counts once, and predictions are in the order of the data."""
    expected = trainer_on(1).test(Regression(), loader(10, 2))[0]
    assert trainer_on(3).test(Split())[0] == pytest.approx(expected, rel=0, abs=1e-12)
    found, in_order = trainer_on(3).predict(Split()), trainer_on(1).predict(Regression(), loader(10, 2))
    torch.testing.assert_close(torch.cat(found), torch.cat(in_order), rtol=0, atol=1e-12)
    with pytest.raises(WorkerRaisedError, match="predictions could not be put in order"):
        trainer_on(3, use_distributed_sampler=False).predict(Split())


def test_who_gets_predictions() -> None:
    """All ranks get them, rank zero alone, or each rank its own."""
    lengths = {}
    for gather in ("all", "rank_zero", None):
        trainer: Any = trainer_on(2)
        trainer.predict(Regression(), loader(10, 2), gather=gather)
        lengths[gather] = [len(trainer.strategy.results[rank][0]) for rank in range(2)]
    assert lengths == {"all": [5, 5], "rank_zero": [5, 0], None: [3, 2]}


def test_ranks_without_samples() -> None:
    """Ranks without a sample do not change the result, metric objects included."""
    found = []
    for world_size in (1, 3):
        module = Measured()
        del module.metrics["spread"]  # torchmetrics cannot put it together from one sample of each rank
        found += trainer_on(world_size).test(module, loader(2, 1))
    assert found[1] == pytest.approx(found[0], rel=0, abs=1e-9)


class Normed(Regression):
    """Normalises its batches, and logs the targets that it validates: by number and by metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, nn.BatchNorm1d(FEATURES).double())
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean(batch[1])
        self.log("mean", self.mean)
        self.log("target", batch[1].mean(), sync_dist=True)


@pytest.mark.parametrize(("samples", "limit"), [(1, 1.0), (19, 0.1)])
def test_validation_on_some_ranks(samples: int, limit: float) -> None:
    """Ranks without a batch to validate take part in a fit, and its result is one process's."""
    found = []
    for devices in (1, 2):
        trainer = trainer_on(devices, max_epochs=1, limit_val_batches=limit)
        trainer.fit(Normed(), loader(8, 8 // devices), loader(samples, 1))
        found.append([float(trainer.callback_metrics[name]) for name in ("mean", "target")])
    assert found[0] == found[1]


class Numbers(IterableDataset[Any]):
    """Iterable data that splits itself, with workers too."""

    shards_itself, data = True, dataset(20)

    def __iter__(self) -> Iterator[Any]:
        place = shard_info()
        return (self.data[index] for index in range(place.shard_index, 20, place.num_shards))


class Range(Numbers):
    """As in torch's documentation: `worker_init_fn` sets the range."""

    start, end = 0, 20

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(self.start, self.end))


def take_part(worker: int) -> None:
    """Set this worker's range: a `worker_init_fn`."""
    place, info = shard_info(), get_worker_info()
    data: Any = info and info.dataset
    data.start, data.end = (20 * (place.shard_index + n) // place.num_shards for n in (0, 1))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Numbers(), {}),
        (Numbers(), {"num_workers": 2}),
        (Range(), {"num_workers": 2, "worker_init_fn": take_part}),
    ],
    ids=["in the rank", "in workers", "by worker_init_fn"],
)
def test_iterable_data_are_evaluated_once(data: Numbers, options: dict[str, Any]) -> None:
    """Iterable data that can be split are: each sample comes once, also through workers.

    A `worker_init_fn` can use `shard_info()` and change the data set that the worker reads.
    """
    expected = trainer_on(1).test(Regression(), loader(20, 20))[0]
    batches = DataLoader(data, batch_size=2, **options)
    assert trainer_on(2).test(Regression(), batches)[0] == pytest.approx(expected, abs=1e-12)


class Odd(Regression):
    """Updates a metric object in training, and logs it on rank zero only in tests."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.error.update(self(batch[0]), batch[1])
        if self.global_rank == 0:
            self.log("error", self.error)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        predicted = self(batch[0])
        self.error.update(predicted.detach(), batch[1])
        self.log("error", self.error)
        return nn.functional.mse_loss(predicted, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_errors_on_all_ranks() -> None:
    """A limit below one batch, a metric object that some ranks log, and another rank's part are refused.

    A sampler that was made before the launch would give all ranks rank zero's part.
    """
    fraction = trainer_on(2, max_epochs=1, limit_val_batches=0.1)
    with pytest.raises(WorkerRaisedError, match=r"A limit of 0\.1 leaves no batch of validation loader 0"):
        fraction.fit(Regression(), loader(8, 4), loader(8, 1))
    with pytest.raises(WorkerRaisedError, match=r"not all logged \['error'\]"):
        trainer_on(2).test(Odd(), loaders()["plain"])
    part = DataLoader(dataset(10), batch_size=2, sampler=DistributedSampler(dataset(10), 2, 0))
    with pytest.raises(WorkerRaisedError, match="part 0 of 2 already, but this rank's is part 1 of 2"):
        trainer_on(2).test(Regression(), part)


def test_metric_objects_ignore_padding_steps() -> None:
    """An update of a metric object in a padding step is undone."""
    data, module = dataset(7), Regression()
    with torch.no_grad():
        expected = nn.functional.mse_loss(module(data.tensors[0]), data.tensors[1])
    trainer = trainer_on(3, max_epochs=1, uneven_inputs="join")
    trainer.fit(Odd(), DataLoader(data, batch_size=1))
    assert trainer.callback_metrics["error"].item() == pytest.approx(expected.item(), abs=1e-6)


def test_metrics_within_fit_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Ranks train with running statistics of their own, and evaluate with rank 0's, which are saved."""
    data, path = loader(40, 4), tmp_path / "saved.ckpt"
    saving = LambdaCallback(on_validation_end=lambda trainer, module: trainer.save_checkpoint(path))
    trainer = trainer_on(2, max_epochs=1, callbacks=saving)
    trainer.fit(Normed(), data, data)
    [after] = trainer_on(2).validate(Normed(), data, ckpt_path=path)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(after["val_loss"], rel=0, abs=1e-12)


class Gathering(Regression):
    """Calls collectives in its steps, in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mean = torchmetrics.MeanMetric(dist_sync_on_step=kind == "metric")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        number = batch[0][:, 0].mean()
        if self.kind == "module":
            self.all_gather(number)
        elif self.kind == "strategy":
            self.trainer.strategy.all_reduce(number)
        elif self.kind == "torch" and dist.is_initialized():
            dist.all_reduce(number)
        elif self.kind == "metric":
            self.mean(number)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(batch[0].sum())

    def on_validation_batch_end(self, *arguments: Any) -> None:
        if self.kind == "hook":
            self.all_gather(torch.ones(()))

    def on_validation_epoch_end(self) -> None:
        self.log("ranks", float(self.all_gather(torch.ones(())).sum()))


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        pytest.param(2, "module", marks=pytest.mark.quick),
        *first(2, [(3, "strategy"), (2, "torch"), (2, "metric"), (3, "hook")]),
    ],
)
def test_collectives_in_steps(world_size: int, kind: str) -> None:
    """They are refused where the ranks have different numbers of batches, and work elsewhere."""
    module, even, uneven = Gathering(kind), loader(4 * world_size, 2), loader(4 * world_size + 1, 2)
    with pytest.raises(WorkerRaisedError, match="validation_step, which the ranks do not call equally often"):
        trainer_on(world_size).validate(module, uneven)
    limited = trainer_on(world_size, limit_val_batches=2)
    for trainer, batches in ((trainer_on(world_size), even), (limited, uneven), (trainer_on(1), uneven)):
        assert trainer.validate(module, batches) == [{"ranks": trainer.world_size}]


def test_collectives_in_predict_steps() -> None:
    """There a limit counts the batches of all ranks."""
    five = loader(9, 2)
    with pytest.raises(WorkerRaisedError, match=r"predict_step, which .*\n.*the ranks have \[3, 2\] batches"):
        trainer_on(2).predict(Gathering("module"), five)
    assert len(trainer_on(2, limit_predict_batches=4).predict(Gathering("module"), five)) == 4


class ByHand(Regression):
    """Computes a metric by hand, or logs it."""

    def __init__(self, metric: torchmetrics.Metric, *, is_logged: bool = False) -> None:
        super().__init__()
        self.metric = metric.set_dtype(torch.float64)
        self.is_logged = is_logged

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(batch[0][:, 0])

    def on_validation_epoch_end(self) -> None:
        self.log("value", self.metric if self.is_logged else self.metric.compute())


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_a_metric_computed_by_hand_without_data() -> None:
    """Lists cannot be exchanged where a rank has no batch: an error names the metric. Logging it works."""
    samples = loader(2, 1)
    expected = dataset(2).tensors[0][:, 0]
    with pytest.raises(WorkerRaisedError, match=r"'metric' cannot be computed by hand"):
        trainer_on(3).validate(ByHand(Median()), samples)
    for world_size in (1, 2, 3):
        [found] = trainer_on(world_size).validate(ByHand(Median(), is_logged=True), samples)
        assert found["value"] == pytest.approx(expected.median().item(), abs=1e-12)
        [found] = trainer_on(world_size).validate(ByHand(torchmetrics.SumMetric()), samples)
        assert found["value"] == pytest.approx(expected.sum().item(), abs=1e-6)

"""A `single_device` strategy within a job of several ranks: each rank trains and evaluates by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rankwise import DDPStrategy, SingleDeviceStrategy, Trainer, TrainingModule
from rankwise.data import shard_info
from rankwise.monitoring import heartbeat
from tests.helpers.shared import computed_once
from tests.process.helpers import WORLD, ddp
from tests.process.training_tasks import Regression, dataset, quiet_trainer, step_by_hand


class Manual(Regression):
    """Steps by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        step_by_hand(self, loss)
        return loss


class Weighted(Regression):
    """Logs the weight of each batch; in float16, whose weights are bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.half()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_weight(float(batch_idx + 1))
        return torch.nn.functional.mse_loss(self(batch[0].half()), batch[1].half())


class OwnData(IterableDataset[Any]):
    """Reads its part of five samples."""

    shards_itself = True

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        num_shards, index = shard_info()
        return iter([dataset(5)[number] for number in range(index, 5, num_shards)])


def trainer(**options: Any) -> Trainer:
    """Return a quiet trainer of one process."""
    strategy = alone(gradient_weighting=options.pop("weighting", None))
    return quiet_trainer(strategy, 1, max_epochs=2, **options)


def alone(**options: Any) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(accelerator="cpu", cluster_environment="local", **options)


def fitted(module: TrainingModule, number: int, **options: Any) -> list[float]:
    """Return the weights that a fit on some data of its own gives."""
    torch.manual_seed(number)
    data = TensorDataset(*(tensor + number for tensor in dataset(6).tensors))
    trainer(**options).fit(module, DataLoader(data, 2))
    return nn.utils.parameters_to_vector(module.parameters()).tolist()


def evaluated(number: int) -> list[Any]:
    """Return the metrics and predictions of data that differ for each number."""
    module, loader = Regression(), DataLoader(TensorDataset(*dataset(4 + number).tensors), 1)
    metrics = trainer().test(module, loader)
    return [metrics, torch.cat(trainer().predict(module, loader)).flatten().tolist()]


def iterated(number: int) -> list[float]:
    """Return how many samples of data that split themselves are seen in a test, a prediction and a fit."""
    loader, fit = DataLoader(OwnData(), 1), trainer()
    fit.fit(Regression(), loader)
    tested = trainer().test(Regression(), loader)[0]["samples"]
    return [float(tested), len(trainer().predict(Regression(), loader)), fit.global_step]


def communicated(number: int) -> list[Any]:
    """Return what the collectives of a strategy of one process return."""
    strategy = alone()

    def run(strategy: SingleDeviceStrategy) -> list[Any]:
        own, sampler = torch.tensor(float(number)), strategy.distributed_sampler_kwargs
        with strategy.rank_zero_first():
            strategy.barrier()
            found = [
                strategy.all_reduce(own, reduce_op="sum"),
                strategy.all_reduce(own, strategy.job_group),
                strategy.all_gather(own),
                strategy.gather_all_tensors(own)[0],
            ]
        return [
            *map(float, found),
            strategy.all_gather_object(number),
            strategy.gather_object(number),
            strategy.broadcast(number),
            strategy.reduce_boolean_decision(number == 1),
            [sampler["num_replicas"], sampler["rank"]],
        ]

    strategy.bind()
    return [run(strategy), strategy.launch(run)]


SCENARIOS: dict[str, Callable[[int], Any]] = {
    "fit": lambda number: fitted(Regression(), number),
    "fit, accumulating": lambda number: fitted(Regression(), number, accumulate_grad_batches=2),
    "fit by hand": lambda number: fitted(Manual(), number),
    "fit with weights": lambda n: fitted(Weighted(), n, weighting="logged", accumulate_grad_batches=2),
    "fit, watching for NaN": lambda number: fitted(Regression(), number, on_nonfinite="raise"),
    "test and predict": evaluated,
    "iterable": iterated,
    "collectives": communicated,
}


def all_scenarios(strategy: DDPStrategy) -> dict[str, Any]:
    """Run every scenario in this rank, in an order of its own; return what each found."""
    heartbeat.report_phase("before", step=3)
    names = SCENARIOS if strategy.is_global_zero else reversed(SCENARIOS)
    found = {name: SCENARIOS[name](strategy.global_rank) for name in names}
    own: Any = heartbeat.own_heartbeat()
    total = strategy.all_reduce(torch.tensor(1.0), reduce_op="sum")
    return {**found, "phase": own.where(), "sum": float(total)}


@pytest.fixture
@computed_once
def ranks() -> list[dict[str, Any]]:
    """What each rank found."""
    strategy = ddp("fork", "tcp", timeout=20)
    strategy.launch(all_scenarios)
    return [strategy.results[rank] for rank in range(WORLD)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_is_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """A job of one process in a rank gives what it gives outside, whatever the other ranks do."""
    for number, found in enumerate(ranks):
        np.testing.assert_equal(found[name], SCENARIOS[name](number))


def test_the_outer_job_goes_on(ranks: list[dict[str, Any]]) -> None:
    """After jobs within it, a rank's phase is what it was, and its collectives work."""
    assert [(found["phase"], found["sum"]) for found in ranks] == [("step 3, before", 2.0)] * WORLD


class Evaluating(Regression):
    """Tests a module by itself, on data of this rank, at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        data = TensorDataset(*(tensor + self.global_rank for tensor in dataset(4).tensors))
        other = Regression()
        expected = torch.nn.functional.mse_loss(other(data.tensors[0]), data.tensors[1])
        found = trainer().test(other, DataLoader(data, 2))[0]["test_loss"]
        torch.testing.assert_close(torch.tensor(found), expected.detach(), check_dtype=False)


def test_a_stage_in_a_hook() -> None:
    """A trainer of one process in a hook of a fit on two ranks evaluates this rank's own data."""
    outer = quiet_trainer(ddp("fork"), 2, max_epochs=2)
    outer.fit(Evaluating(), DataLoader(dataset(8), 2))
    assert outer.global_step == 4


def contradicting(strategy: DDPStrategy) -> str:
    """Use a strategy of one rank, without a launch, in the process group of two."""
    other = DDPStrategy(accelerator="cpu", devices=1, cluster_environment="local", start_method="fork")
    other.bind()
    assert dist.get_world_size() == WORLD
    with pytest.raises(RuntimeError) as caught:
        other.all_reduce(torch.ones(1))
    return str(caught.value)


def test_another_groups_ranks_are_refused() -> None:
    """DDP of one rank does not take a process group of two for its own."""
    text = ddp("fork").launch(contradicting)
    assert "rank 0 of 2, but in the job it is global_rank 0 of 1" in text

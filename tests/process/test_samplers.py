"""Samplers that draw random numbers give two ranks one process's samples, in every stage; or an error."""

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from rankwise import TrainingModule, seed_everything
from rankwise.callbacks import LambdaCallback
from rankwise.errors import WorkerRaisedError
from tests.helpers.parameters import first
from tests.process.training_tasks import trainer_on

SAMPLES = 24
_UNREACHABLE = random.Random()  # no attribute of a sampler


class Shuffled(Sampler[int]):
    """Shuffles with a generator of its own, which nobody has seeded."""

    def __init__(self) -> None:
        self.random_source: Any = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.random_source.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Unseeded(Shuffled):
    """Shuffles with a generator that is not found."""

    def __iter__(self) -> Iterator[int]:
        _UNREACHABLE.seed()
        return iter(_UNREACHABLE.sample(range(SAMPLES), SAMPLES))


class Reader(TrainingModule):
    """Notes the samples of each stage, which it makes on each rank."""

    def __init__(self, sampler: Any = Shuffled, *arguments: Any, global_batch: int = 4) -> None:
        super().__init__()
        self.global_batch = global_batch
        self.layer = nn.Linear(1, 1)
        self.make = sampler, arguments
        self.read: list[list[float]] = []

    def setup(self, stage: str) -> None:
        make, arguments = self.make
        self.sampler, self.splits_batches = make(*arguments), stage == "predict"

    def loader(self) -> DataLoader[Any]:
        size = self.global_batch // (1 if self.splits_batches else self.trainer.world_size)
        return DataLoader(torch.arange(24.0), size, sampler=self.sampler)  # type: ignore[arg-type]  # a tensor has samples

    train_dataloader = test_dataloader = predict_dataloader = loader

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read.append(batch.tolist())
        loss: Tensor = self.layer(batch[:, None]).mean()
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("sum", (2 ** batch.double()).sum(), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def on_train_end(self) -> None:
        self.hparams["read"] = self.trainer.strategy.all_gather_object(self.read)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def seeded(devices: int, **options: Any) -> Any:
    """Return a trainer on that many forked ranks, or in this process; both from the same seed."""
    seed_everything(4)
    return trainer_on(devices, max_epochs=2, **options)


def steps(module: Reader) -> list[list[float]]:
    """Return the samples that all ranks together have read in each step of a fit."""
    return [sorted(chain(*parts)) for parts in zip(*module.hparams["read"], strict=True)]


@pytest.mark.quick
def test_an_unseeded_generator_of_numpy() -> None:
    """Two ranks whose sampler has a NumPy generator see each sample once in each epoch, in a new order."""
    module = Reader()
    seeded(2).fit(module)
    first, second = steps(module)[:6], steps(module)[6:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(SAMPLES))
    assert first != second


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + n % 3 for n in range(SAMPLES)], SAMPLES)


def repeated() -> RandomSampler:
    return RandomSampler(range(SAMPLES), replacement=True, generator=torch.Generator().manual_seed(5))


def legacy() -> Shuffled:
    sampler = Shuffled()
    sampler.random_source = np.random.RandomState(5)
    return sampler


@pytest.mark.parametrize("make", first(1, [weighted, repeated, legacy]))
def test_two_ranks_sample_as_one_process(make: Any) -> None:
    """Training, test and prediction of a part of the data use one process's samples, again and again."""
    found = []
    for devices in (1, 2):
        module = Reader(make)
        trainer = seeded(devices, limit_train_batches=4, limit_test_batches=4, limit_predict_batches=4)
        trainer.fit(module)
        tested = [trainer.test(module)[0]["sum"] for _ in range(2)]
        predicted = [torch.cat(trainer.predict(module)).tolist() for _ in range(2)]
        found.append([steps(module), tested, predicted])
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", ["fit", "test", "predict"])
def test_orders_that_differ(stage: str) -> None:
    """Where ranks draw different orders nevertheless, all raise, and none trains on a part of the data."""
    with pytest.raises(WorkerRaisedError, match=r"what the sampler of \w+ loader 0 draws"):
        getattr(seeded(2), stage)(Reader(Unseeded))


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_orders_that_a_callback_changes(ranks: tuple[int, ...]) -> None:
    """A callback may change what a sampler yields before an epoch, on all ranks alike."""

    def reverse(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank in ranks:
            module.sampler.reverse()

    module = Reader(list, range(SAMPLES))
    trainer = seeded(2, callbacks=LambdaCallback(on_train_epoch_start=reverse))
    if len(ranks) == 1:
        with pytest.raises(WorkerRaisedError, match="what the sampler of training loader 0 draws"):
            trainer.fit(module)
    else:
        trainer.fit(module)
        assert steps(module)[6:] == steps(module)[:6][::-1]


class Unsized(Sampler[int]):
    """Shuffles with torch's global generator, for some passes over the data; has no length."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.passes):
            yield from torch.randperm(SAMPLES).tolist()


@pytest.mark.parametrize("passes", [1, pytest.param(10**6, marks=pytest.mark.quick)])
def test_random_samplers_without_length(passes: int) -> None:
    """One process draws the order that two and three ranks draw, also of a stream that has no end."""
    found = []
    for devices in (1, 2, 3):
        module = Reader(Unsized, passes, global_batch=6)
        seeded(devices, limit_train_batches=3).fit(module)
        found.append(steps(module))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len({tuple(step) for step in found[0]}) == 6

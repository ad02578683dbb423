"""Loaders that are split over ranks by their indices."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from rankwise.data import shard_for_evaluation, shard_for_prediction, shard_for_training, shard_info
from rankwise.data.sampler import set_epoch_of
from rankwise.data.sharding import check_shardable
from rankwise.errors import UnshardableLoaderError

DATA: Any = list(range(7))


def batches(shard: Any, world_size: int, loader: Any, **options: Any) -> list[list[Any]]:
    """Return each rank's batches, as lists."""
    parts = [shard(loader, world_size, rank, **options) for rank in range(world_size)]
    return [[batch.tolist() if torch.is_tensor(batch) else batch for batch in part] for part in parts]


def test_shards() -> None:
    """Those for training are equal: samples are repeated, or left out as the loader does.

    Nothing is repeated in evaluation. In prediction the ranks get the loader's own batches in turn.
    """
    loader = DataLoader(DATA, 2)
    assert batches(shard_for_training, 2, loader) == [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]
    drops = DataLoader(DATA, 3, drop_last=True)
    assert batches(shard_for_training, 2, drops) == [[[0, 2, 4]], [[1, 3, 5]]]
    assert batches(shard_for_evaluation, 2, loader) == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    assert batches(shard_for_prediction, 2, loader) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    for world_size in (1, 2, 3):  # the ranks together get the samples of one process
        parts = batches(shard_for_evaluation, world_size, drops)
        assert sorted(index for part in parts for batch in part for index in batch) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shard", [shard_for_training, shard_for_evaluation])
def test_shuffled_loaders_stay_shuffled(shard: Any) -> None:
    """The ranks split one permutation of all samples."""
    data: Any = list(range(40))
    parts = batches(shard, 2, DataLoader(data, 2, shuffle=True), seed=3)
    first, second = ([index for batch in part for index in batch] for part in parts)
    assert sorted(first + second) == list(range(40))
    assert first != sorted(first)


@pytest.mark.parametrize("shard", [shard_for_training, shard_for_evaluation, shard_for_prediction])
def test_loaders_without_batches(shard: Any) -> None:
    """A loader with batch_size=None is split by its samples."""
    first, second = batches(shard, 2, DataLoader(DATA, batch_size=None))
    assert first == [0, 2, 4, 6]
    assert second[:3] == [1, 3, 5]


def test_own_batch_sampler_is_split_by_batches() -> None:
    """Batches of the user's own sampler stay whole; training repeats the first ones."""
    loader: Any = DataLoader(DATA, batch_sampler=[[0], [1, 2], [3, 4, 5]])
    assert batches(shard_for_training, 2, loader) == [[[0], [3, 4, 5]], [[1, 2], [0]]]
    assert batches(shard_for_evaluation, 2, loader) == [[[0], [3, 4, 5]], [[1, 2]]]


def test_subclassed_batch_sampler_is_split_by_batches() -> None:
    """The batches of a subclass of torch's BatchSampler stay whole."""

    class Reversed(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(list(super().__iter__())[::-1])

    loader = DataLoader(DATA, batch_sampler=Reversed(SequentialSampler(DATA), 3, False))
    assert batches(shard_for_evaluation, 2, loader) == [[[6], [0, 1, 2]], [[3, 4, 5]]]


def test_custom_sampler_is_split() -> None:
    """A sampler that draws with weights is split like any other."""
    loader = DataLoader(DATA, 2, sampler=WeightedRandomSampler([0, 1, 0, 1, 0, 1, 0], 8))
    drawn = torch.tensor(batches(shard_for_training, 2, loader))
    assert drawn.shape == (2, 2, 2)
    assert set(drawn.flatten().tolist()) <= {1, 3, 5}


def test_subclass_keeps_its_own_arguments() -> None:
    """A user's loader class is copied with its attributes, and its constructor is not called."""

    class Own(DataLoader[int]):
        def __init__(self, colour: str) -> None:
            super().__init__(DATA, batch_size=2, collate_fn=list)
            self.colour = colour

    loader = Own("red")
    shard = shard_for_training(loader, 2, 1)
    assert (type(shard), shard.colour, shard.collate_fn) == (Own, "red", list)
    assert len(loader) == 4  # the user's own is as it was
    assert len(shard) == 2


@pytest.mark.parametrize("shard", [shard_for_training, shard_for_evaluation])
def test_split_loaders_do_not_change(shard: Any) -> None:
    """A loader with a DistributedSampler, or one that is already split, does not change."""
    loader = DataLoader(DATA, sampler=DistributedSampler(DATA, 7, 0))
    assert shard(loader, 7, 0) is loader
    split = shard(DataLoader(DATA), 2, 0)
    assert shard(split, 2, 0) is split


def test_iterable_dataset() -> None:
    """A data set without indices cannot be split; the error says what the user can do."""

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(DATA)

    with pytest.raises(UnshardableLoaderError, match="Numbers") as caught:
        check_shardable(DataLoader(Numbers()))
    assert "give Numbers a method shard(num_shards, index)" in caught.value.remedy
    assert "rankwise.data.shard_info()" in caught.value.remedy


def test_other_iterables() -> None:
    """A list of batches is not a loader."""
    with pytest.raises(UnshardableLoaderError, match="list cannot be split"):
        shard_for_training([1, 2], 2, 0)  # type: ignore[type-var]  # that is the point


class InParts(IterableDataset[int]):
    """Iterable data with a method `shard`."""

    def __init__(self, numbers: Any = DATA) -> None:
        self.numbers = numbers
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> list[int]:
        return list(self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class SplitsItself(IterableDataset[int]):
    """Iterable data that reads `shard_info()`."""

    shards_itself = True

    def __iter__(self) -> Iterator[int]:
        num_shards, index = shard_info()
        return iter(DATA[index::num_shards])


@pytest.mark.parametrize("dataset", [InParts(), SplitsItself()])
@pytest.mark.parametrize("shard", [shard_for_training, shard_for_evaluation])
def test_iterable_data_that_can_be_split(shard: Any, dataset: Any) -> None:
    """Data with shard(num_shards, index), and data that reads shard_info(), are split over the ranks."""
    assert batches(shard, 2, DataLoader(dataset, 2)) == [[[0, 2], [4, 6]], [[1, 3], [5]]]


def test_iterable_data_get_the_epoch() -> None:
    """`set_epoch` is called on the data; `dataset` has all attributes of the user's, to read and to set."""
    dataset: Any = shard_for_training(DataLoader(InParts()), 2, 0).dataset
    set_epoch_of(3, dataset)
    assert (dataset.epoch, dataset.numbers) == (3, DATA)
    assert pickle.loads(pickle.dumps(dataset)).numbers == DATA
    data: Any = InParts()
    data.part = "first"
    shard: Any = shard_for_training(DataLoader(data), num_replicas=2, rank=1)
    assert shard.dataset.part == "first"
    shard.dataset.part = "second"
    assert data.part == "second"


def test_iterable_data_cannot_be_predicted_in_order() -> None:
    """Predictions of data without indices cannot be ordered; the error says what can be done."""
    with pytest.raises(UnshardableLoaderError, match="put in order") as caught:
        shard_for_prediction(DataLoader(InParts()), 2, 0)
    assert "gather=None" in caught.value.fix()


def test_everything_that_a_loader_has_is_kept() -> None:
    """Collate function, worker_init_fn, generator and other attributes are the user's own."""
    generator = torch.Generator()
    options: dict[str, Any] = {"collate_fn": list, "worker_init_fn": print, "timeout": 3}
    loader = DataLoader(
        DATA, 2, shuffle=True, generator=generator, num_workers=2, prefetch_factor=5, **options
    )
    shard = shard_for_training(loader, 2, 0)
    assert shard.generator is generator
    assert {name: getattr(shard, name) for name in options} == options
    assert (shard.num_workers, shard.prefetch_factor) == (2, 5)

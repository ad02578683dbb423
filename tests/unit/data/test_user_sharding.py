"""Loaders that the user has already split over the ranks, shuffles, or gives a generator."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from rankwise.data import shard_for_evaluation, shard_for_prediction, shard_for_training
from rankwise.data.batches import batch_sizes
from rankwise.data.sharding import in_dataset_order, order_seed
from rankwise.errors import UnshardableLoaderError

DATA: Any = list(range(10))


class Renamed(DistributedSampler[Any]):
    """A subclass that selects samples as torch does."""


class Sorted(DistributedSampler[Any]):
    """A subclass with another order, so that the repeated samples are unknown."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__()))


class Unrepeated(DistributedSampler[Any]):
    """A subclass that repeats nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.num_samples = len(range(self.rank, len(DATA), self.num_replicas))
        self.total_size = len(DATA)

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(DATA), self.num_replicas))


def plain(rank: int, kind: type[DistributedSampler[Any]] = DistributedSampler, **options: Any) -> Any:
    """Return a sampler for one of three ranks."""
    return kind(DATA, 3, rank, shuffle=False, **options)


def as_sampler(sampler: Any) -> DataLoader[Any]:
    return DataLoader(DATA, 2, sampler=sampler)


def in_batch_sampler(sampler: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, False))


def without_batches(sampler: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=None, sampler=sampler)


WAYS = (as_sampler, in_batch_sampler, without_batches)


def read(loader: Any) -> list[Any]:
    """Return a loader's samples."""
    return [index for batch in loader for index in torch.as_tensor(batch).flatten().tolist()]


@pytest.mark.parametrize("kind", [DistributedSampler, Renamed, Unrepeated])
def test_evaluation_counts_each_sample_once(kind: Any) -> None:
    """Ten samples on three ranks: those that a sampler repeats are left out, wherever the sampler is."""
    for make in WAYS:
        shards = [shard_for_evaluation(make(plain(rank, kind)), 3, rank) for rank in range(3)]
        assert sorted(index for shard in shards for index in read(shard)) == DATA
    once = shard_for_evaluation(as_sampler(plain(2, kind)), 3, 2)
    assert shard_for_evaluation(once, 3, 2) is once  # splitting by hand, before the Trainer does
    # The length of a sampler that repeats nothing holds for one rank only, so the sizes are unknown.
    assert (batch_sizes(as_sampler(plain(1, kind))) is None) == (kind is Unrepeated)


class OfTwo(BatchSampler):
    """A batch sampler of the user's own."""


@pytest.mark.parametrize(
    "loader", [as_sampler(plain(1, Sorted)), DataLoader(DATA, batch_sampler=OfTwo(plain(1), 2, False))]
)
def test_evaluation_refuses_unknown_repetitions(loader: Any) -> None:
    """Unknown repetitions are an error; without repetitions such a loader does not change."""
    with pytest.raises(UnshardableLoaderError, match="samples are repeated") as caught:
        shard_for_evaluation(loader, 3, 1)
    assert "drop_last=True" in caught.value.fix()
    kept = as_sampler(plain(1, Sorted, drop_last=True))
    assert shard_for_evaluation(kept, 3, 1) is kept


@pytest.mark.parametrize("shard", [shard_for_training, shard_for_evaluation])
@pytest.mark.parametrize("place", [(3, 1), (4, 0), (1, 0)])
def test_another_ranks_part_is_refused(shard: Any, place: tuple[int, int]) -> None:
    """A sampler for another rank or number of ranks is an error, also of a loader that rankwise has split."""
    for make in WAYS:
        with pytest.raises(UnshardableLoaderError, match="it has part 0 of 3 already, but this rank's is"):
            shard(make(plain(0)), *place)
    with pytest.raises(UnshardableLoaderError, match="ShardedSampler"):
        shard_for_training(shard_for_training(DataLoader(DATA, 2), 2, 0), 2, 1)


@pytest.mark.parametrize(
    "sampler", [plain(0), plain(2, Renamed), RandomSampler(DATA), DistributedSampler(DATA, 3, 0)]
)
def test_prediction_has_the_order_of_the_data(sampler: Any) -> None:
    """Torch's samplers that shuffle or split are replaced, wherever they are; those that select stay."""
    for make in WAYS:
        assert read(in_dataset_order(make(sampler))) == DATA
        size = 1 if make is without_batches else 2
        parts = [read(shard_for_prediction(make(sampler), 2, rank)) for rank in range(2)]
        assert parts[0] == [index for index in DATA if index // size % 2 == 0]
        assert sorted(parts[0] + parts[1]) == DATA
    drawn = (RandomSampler(DATA, replacement=True), RandomSampler(DATA, num_samples=3))
    for own in (SubsetRandomSampler([3, 1]), *drawn, SequentialSampler(DATA)):
        loader = as_sampler(own)
        assert in_dataset_order(loader) is loader


@pytest.mark.parametrize(
    "loader",
    [
        as_sampler(plain(0, Sorted)),
        DataLoader(DATA, batch_sampler=OfTwo(plain(0), 2, False)),
        shard_for_evaluation(DataLoader(DATA, 2), 3, 0),
        shard_for_training(DataLoader(DATA, batch_size=None), 3, 0),
    ],
)
def test_prediction_refuses_parts_that_cannot_be_put_in_order(loader: Any) -> None:
    """Loaders split by samples, or with repetitions, are errors; those split by batches work."""
    with pytest.raises(UnshardableLoaderError, match="could not be put in order") as caught:
        shard_for_prediction(loader, 3, 0)
    assert "gather=None" in caught.value.fix()
    whole = shard_for_prediction(DataLoader(DATA, 2), 3, 0)
    assert shard_for_prediction(whole, 3, 0) is whole


def test_the_sampler_in_a_batch_sampler_is_what_is_split() -> None:
    """It is the batch sampler's sampler, not the loader's sequential one; `drop_last` counts too."""
    batches = BatchSampler(SubsetRandomSampler([7, 8, 9]), 1, drop_last=True)
    parts = [read(shard_for_training(DataLoader(DATA, batch_sampler=batches), 2, rank)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 1
    assert set(parts[0] + parts[1]) < {7, 8, 9}


def shuffled(seed: int) -> DataLoader[Any]:
    return DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_the_users_generator_decides_the_order() -> None:
    """Its seed determines the order, the same on each rank, unless there is an explicit one."""
    orders = [[read(shard_for_training(shuffled(seed), 2, rank)) for rank in range(2)] for seed in (5, 6, 5)]
    assert orders[0] == orders[2] != orders[1]
    assert all(sorted(first + second) == DATA for first, second in orders)
    assert read(shard_for_training(shuffled(5), 1, 0, seed=1)) == read(
        shard_for_training(shuffled(6), 1, 0, seed=1)
    )
    assert order_seed(shuffled(5)) == order_seed(shuffled(5)) != order_seed(shuffled(6))
    assert order_seed(DataLoader(DATA, 2, shuffle=True)) is None
    assert order_seed(shard_for_training(shuffled(5), 2, 0)) is None
    assert order_seed([1, 2]) is None

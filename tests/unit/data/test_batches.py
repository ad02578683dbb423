"""Batch sizes: of all ranks, computed before any batch is read, and of the batches that were read."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from rankwise.data import shard_for_evaluation, shard_for_training
from rankwise.data.batches import batch_sizes, described_batches
from tests.unit.trainer.helpers import Stream


def dataset(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def real(loader: Any) -> list[int]:
    return [len(batch) for [batch] in loader]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": True}])
@pytest.mark.parametrize("shard", [shard_for_training, shard_for_evaluation])
def test_they_are_what_the_loaders_yield(options: Any, shard: Any) -> None:
    """They are right for any number of samples and ranks, and 0 after a rank's last batch."""
    for count, world_size in itertools.product([1, 7, 16, 23], [1, 2, 3]):
        plain = DataLoader(dataset(count), batch_size=4, **options)
        loaders = [shard(plain, world_size, rank) for rank in range(world_size)]
        lengths = [real(loader) for loader in loaders]
        for rank, loader in enumerate(loaders):
            sizes = batch_sizes(loader)
            assert sizes is not None
            assert (sizes.rank, sizes.num_replicas) == (rank, world_size)
            for other, expected in enumerate(lengths):
                found = [sizes.size_of(other, batch) for batch in range(len(expected) + 2)]
                assert found == [*expected, 0, 0], (count, world_size)
            assert sizes.size_of(sizes.rank, 0) == (lengths[rank] or [0])[0]


class Random(BatchSampler):
    """Batches of random sizes, from torch's random numbers."""

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield list(range(int(torch.randint(1, 9, ()))))

    def __len__(self) -> int:
        return 6


def test_batches_that_are_drawn() -> None:
    """The batches of a user's own sampler are drawn once; the loader then yields these."""
    plain = DataLoader(dataset(9), batch_sampler=Random(SequentialSampler(range(9)), 1, False))
    loaders = [shard_for_training(plain, 2, rank) for rank in range(2)]
    for epoch in range(3):
        for loader in loaders:
            loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]  # ours has it
        known = [batch_sizes(loader) for loader in loaders]
        lengths = [real(loader) for loader in loaders]
        for sizes in known:
            assert sizes is not None
            found = [[sizes.size_of(rank, batch) for batch in range(4)] for rank in (0, 1)]
            assert found == [[*length, 0] for length in lengths]


def test_a_distributed_sampler_of_the_users() -> None:
    """It gives every rank the same number of samples; a loader that is not split has one rank, number 0."""
    sampler: Any = DistributedSampler(dataset(9), num_replicas=2, rank=1)
    sizes = batch_sizes(DataLoader(dataset(9), batch_size=2, sampler=sampler))
    assert sizes is not None
    assert (sizes.rank, sizes.num_replicas) == (1, 2)
    for rank in range(2):
        assert [sizes.size_of(rank, batch) for batch in range(4)] == [2, 2, 1, 0]
    alone = batch_sizes(DataLoader(dataset(5), 2))
    assert alone is not None
    assert (alone.rank, alone.num_replicas, alone.size_of(0, 2)) == (0, 1, 1)


class Endless(RandomSampler):
    """Has no length."""

    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2, 3],
        DataLoader(Stream(range(4)), batch_size=2),
        DataLoader(dataset(4), batch_size=None),
        DataLoader(dataset(4), batch_size=2, sampler=Endless(dataset(4))),
        DataLoader(dataset(4), batch_sampler=Random(SequentialSampler(range(4)), 1, False)),
    ],
)
def test_unknown_sizes(loader: Any) -> None:
    """They are unknown without batches, without length, and for a sampler of the user's own."""
    assert batch_sizes(loader) is None


class Whole(TensorDataset):
    """Gives a batch's samples as one pair of tensors."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.tensors[0][indices], self.tensors[0][indices]


class Halved(DataLoader[Any]):
    """Yields half of each batch."""

    def __iter__(self) -> Any:
        return ([batch[: len(batch) // 2]] for [batch] in super().__iter__())


def test_a_loader_that_changes_its_batches() -> None:
    """Sizes then do not follow from the indices; `__getitems__` may return fewer, or what tells no number."""
    found = [(batch.tolist(), size) for [batch], size, _ in described_batches(Halved(dataset(8), 4))()]
    assert found == [([0, 1], None), ([4, 5], None)]


def taken(samples: list[Any]) -> list[Any]:
    """Return the samples without the fourth of the data."""
    return [sample for sample in samples if int(sample[0]) != 3]


def graphs(samples: list[Any]) -> Any:
    """Return a batch of graphs of several nodes each."""
    return {"nodes": torch.zeros(20, 4), "graphs": torch.zeros(len(samples))}


COLLATED: dict[str, tuple[Callable[[list[Any]], Any], list[int | None]]] = {
    "left out": (lambda samples: default_collate(taken(samples)), [3, None, 1]),
    "left out of lists": (lambda samples: {"numbers": [int(one) for [one] in taken(samples)]}, [3, None, 1]),
    "flattened": (lambda samples: torch.zeros(4 * len(samples), 9), [None, None, 1]),
    "packed": (lambda samples: {"tokens": torch.zeros(1, 50)}, [None, None, 1]),
    "second dimension": (lambda samples: (torch.zeros(50, len(samples)), torch.zeros(50)), [3, 3, 1]),
    "one of several": (graphs, [3, 3, 1]),
    "lists": (lambda samples: [[torch.zeros(5)] * len(samples), "names"], [3, 3, 1]),
    "objects": (iter, [3, 3, 1]),
}


@pytest.mark.parametrize("kind", COLLATED)
def test_what_is_collated_has_the_size(kind: str) -> None:
    """The size is not known of a batch in which nothing has the length of its indices."""
    collate, expected = COLLATED[kind]
    described = described_batches(DataLoader(dataset(7), 3, collate_fn=collate))
    assert [size for _, size, _ in described()] == expected


class Together(Dataset[Any]):
    """Reads several samples at once, and leaves out those that it cannot read."""

    def __len__(self) -> int:
        return 7

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor(index) for index in indices if index != 3]

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def test_samples_that_come_together() -> None:
    """`__getitems__` may return fewer than asked for, or what says nothing about their number."""
    described = described_batches(DataLoader(Together(), 3))
    assert [(len(batch), size) for batch, size, _ in described()] == [(3, 3), (2, None), (1, 1)]
    described = described_batches(DataLoader(Whole(torch.arange(7)), 3, collate_fn=tuple))
    assert [size for _, size, _ in described()] == [3, 3, 1]

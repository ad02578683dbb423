"""Split iterable data over the ranks, and over the workers of each rank's loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["ShardInfo", "ShardedIterable", "can_be_split", "shard_info"]


class ShardInfo(NamedTuple):
    """Which part of iterable data is this process's: number `shard_index` of `num_shards`."""

    num_shards: int
    shard_index: int


# This process's place among the ranks, while a `ShardedIterable` is read in it.
_place: ShardInfo | None = None


def shard_info() -> ShardInfo:
    """Return which part of the data to read; for an `IterableDataset` that sets `shards_itself = True`.

    Every worker of every rank's loader gets another one, and together they get all. Call it in `__iter__`, or
    in a `worker_init_fn`, which may set attributes of `torch.utils.data.get_worker_info().dataset`.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> class Numbers(IterableDataset):
        ...     shards_itself = True
        ...
        ...     def __iter__(self):
        ...         num_shards, index = shard_info()
        ...         return iter(range(index, 10, num_shards))
    """
    worker = get_worker_info()
    place = _place
    if place is None and worker is not None and isinstance(worker.dataset, ShardedIterable):
        place = worker.dataset.place  # in a worker_init_fn, before anything is read
    place = _default_place() if place is None else place
    if worker is None:
        return place
    return ShardInfo(
        place.num_shards * worker.num_workers, place.shard_index * worker.num_workers + worker.id
    )


def can_be_split(dataset: Any) -> bool:
    """Return whether iterable data has a way to be split: see `ShardedIterable`."""
    return callable(getattr(dataset, "shard", None)) or bool(getattr(dataset, "shards_itself", False))


@final
class ShardedIterable(IterableDataset[Any]):
    """A rank's part of iterable data; further split in the workers of its loader.

    All attributes but `dataset` and `place` are the data's own, to read and to set.

    Args:
        dataset: has `shard(num_shards, index)`, which returns an iterable over that part, called anew in
            every worker each time the data are read; or has `shards_itself = True` and splits itself in
            `__iter__`, by `shard_info()` or in its own way.
        num_replicas: over how many ranks the data are split.
        rank: whose part this is.
    """

    def __init__(self, dataset: Any, num_replicas: int, rank: int) -> None:
        self.dataset = dataset
        self.place = ShardInfo(num_replicas, rank)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to data that have epochs. Persistent workers keep the epoch they started with."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with _placed(self.place):
            if getattr(self.dataset, "shards_itself", False):
                yield from self.dataset
            else:
                yield from self.dataset.shard(*shard_info())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dataset", "place"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, while this is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


@contextmanager
def _placed(place: ShardInfo) -> Iterator[None]:
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def _default_place() -> ShardInfo:
    if dist.is_available() and dist.is_initialized():
        return ShardInfo(dist.get_world_size(), dist.get_rank())
    return ShardInfo(1, 0)

"""Split iterable data over the ranks, and over the worker processes of each rank's loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, final

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from rankwise.data.sampler import check_part


class ShardInfo(NamedTuple):
    """The part of iterable data that this process reads: number `shard_index` of `num_shards`."""

    num_shards: int
    shard_index: int


# This rank's part, while this process reads a `ShardedIterable`.
_current: ShardInfo | None = None


def shard_info() -> ShardInfo:
    """Return the part of the data to read, for an `IterableDataset` with `shards_itself = True`.

    Every worker of every rank's loader gets a different part; together they get all data. Call it in
    `__iter__`, or in a `worker_init_fn`, which may set attributes of
    `torch.utils.data.get_worker_info().dataset`.

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
    part = _current
    if part is None and worker is not None and isinstance(worker.dataset, ShardedIterable):
        part = worker.dataset._shard_info  # in a worker_init_fn, before reading starts
    if part is None:
        is_distributed = dist.is_available() and dist.is_initialized()
        part = ShardInfo(dist.get_world_size(), dist.get_rank()) if is_distributed else ShardInfo(1, 0)
    if worker is None:
        return part
    return ShardInfo(part.num_shards * worker.num_workers, part.shard_index * worker.num_workers + worker.id)


def can_be_split(dataset: Any) -> bool:
    """Return whether iterable data has one of the interfaces that `ShardedIterable` needs."""
    return callable(getattr(dataset, "shard", None)) or bool(getattr(dataset, "shards_itself", False))


@final
class ShardedIterable(IterableDataset[Any]):
    """A rank's part of iterable data, split further in the workers of its loader.

    All attributes except `dataset` are read from and set on the dataset.

    Args:
        dataset: has a method `shard(num_shards, index)` that returns an iterable over that part, called in
            every worker for each pass over the data; or has `shards_itself = True` and splits itself in
            `__iter__`, with `shard_info()` or in its own way.
        num_replicas: the number of ranks.
        rank: the rank that reads this part.

    Raises:
        InvalidArgumentError: when there is no such part.
    """

    def __init__(self, dataset: Any, num_replicas: int, rank: int) -> None:
        check_part(num_replicas, rank)
        self.dataset = dataset
        self._shard_info = ShardInfo(num_replicas, rank)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`, if any. Persistent workers keep the epoch they started in."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        global _current
        before, _current = _current, self._shard_info
        try:
            if getattr(self.dataset, "shards_itself", False):
                yield from self.dataset
            else:
                yield from self.dataset.shard(*shard_info())
        finally:
            _current = before

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dataset", "_shard_info"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # missing while this object is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

"""Split a data loader over ranks, on its stream of indices; the loader itself is copied, never rebuilt."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from typing_extensions import TypeVar

from rankwise.data.first_items import FirstItems
from rankwise.data.iterable import ShardedIterable, can_be_split
from rankwise.data.sampler import ShardedSampler, Uneven, has_length
from rankwise.errors import UnshardableLoaderError

__all__ = [
    "check_shardable",
    "is_shardable",
    "is_split",
    "shard_for_evaluation",
    "shard_for_prediction",
    "shard_for_training",
    "with_stream",
]

Loader = TypeVar("Loader", bound="DataLoader[Any]")


def shard_for_training(
    loader: Loader, num_replicas: int, rank: int, *, seed: int = 0, uneven: Uneven | None = None
) -> Loader:
    """Return `loader` with this rank's samples, shuffled if they were; by default as many on every rank.

    Samples that do not divide evenly are repeated from the beginning, or left out if the loader drops its
    last batch; or what `uneven` says. With a batch sampler of the user's own, whole batches are dealt out
    instead of samples.

    Raises:
        UnshardableLoaderError: when the loader has no index stream.
    """
    default: Uneven = "drop" if _drops_last(loader) else "pad"
    return _sharded(loader, num_replicas, rank, seed=seed, uneven=default if uneven is None else uneven)


def shard_for_evaluation(loader: Loader, num_replicas: int, rank: int, *, seed: int = 0) -> Loader:
    """Return `loader` with this rank's samples, each sample on exactly one rank; lengths may differ by one.

    What the ranks see together is what one process sees: a loader that drops its last batch leaves the same
    samples out, and a `DistributedSampler` of the user's does not repeat any.

    Raises:
        UnshardableLoaderError: when the loader has no index stream, and its data no way to be split.
    """
    if is_shardable(loader) and type(loader.sampler) is DistributedSampler:
        return _without_padding(loader, loader.sampler)
    if is_shardable(loader) and type(loader.batch_sampler) is BatchSampler and not is_split(loader):
        loader = _without_last_batch(loader, loader.batch_sampler)
    return _sharded(loader, num_replicas, rank, seed=seed, uneven="keep")


def shard_for_prediction(loader: Loader, num_replicas: int, rank: int, *, seed: int = 0) -> Loader:
    """Return `loader` with the batches `rank`, `rank + num_replicas`, ... of those that it has.

    Outputs of `predict_step` are opaque, so only whole batches can be put back in order afterwards. A
    `DistributedSampler` of the user's gives way to the order of the data set.

    Raises:
        UnshardableLoaderError: when the loader has no index stream.
    """
    check_shardable(loader, by_index=True)
    if type(loader.sampler) is DistributedSampler and loader.batch_sampler is not None:
        dataset: Any = loader.sampler.dataset
        loader = _resampled(loader, loader.batch_sampler, SequentialSampler(dataset))
    if is_split(loader):
        return loader
    stream = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return with_stream(loader, ShardedSampler(stream, num_replicas, rank, seed=seed))


def _sharded(loader: Loader, num_replicas: int, rank: int, *, seed: int, uneven: Uneven) -> Loader:
    check_shardable(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _changed(loader, dataset=ShardedIterable(loader.dataset, num_replicas, rank))
    if is_split(loader):
        return loader
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return with_stream(loader, ShardedSampler(batches, num_replicas, rank, seed=seed, uneven=uneven))
    sampler = ShardedSampler(loader.sampler, num_replicas, rank, seed=seed, uneven=uneven)
    if batches is None:
        return with_stream(loader, sampler)
    return _resampled(loader, batches, sampler)


def _without_padding(loader: Loader, sampler: Any) -> Loader:
    """Return a loader that the user has split without the samples that were repeated to make parts even."""
    if sampler.drop_last or loader.batch_sampler is None:
        return loader
    if len(sampler.dataset) % sampler.num_replicas == 0:
        return loader
    own = FirstItems(sampler, len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas)))
    return _resampled(loader, loader.batch_sampler, own)


def _without_last_batch(loader: Loader, batches: BatchSampler) -> Loader:
    """Return a loader that drops nothing, of those samples that `loader` has in whole batches."""
    if not batches.drop_last or not has_length(batches.sampler):
        return loader
    own = FirstItems(batches.sampler, len(batches) * batches.batch_size)
    return _resampled(loader, batches, own, drop_last=False)


def _resampled(loader: Loader, batches: Any, sampler: Any, **changes: Any) -> Loader:
    """Return a copy of `loader` whose batches are made of what another sampler yields."""
    resampled = copy.copy(batches)
    resampled.sampler = sampler
    for name, value in changes.items():
        setattr(resampled, name, value)
    return with_stream(loader, resampled, sampler)


def check_shardable(loader: Any, *, by_index: bool = False) -> None:
    """Make sure that `loader` can be split over ranks; with `by_index`, so that the order can be restored.

    Raises:
        UnshardableLoaderError: when it is no data loader, or has no index stream and no way to be split.
    """
    remedy = (
        "split the data by rank where it is read (dist.get_rank(), or module.global_rank), and pass "
        "Trainer(use_distributed_sampler=False)."
    )
    if not isinstance(loader, DataLoader):
        raise UnshardableLoaderError(
            loader=type(loader).__name__, reason="it is not a torch DataLoader", remedy=remedy
        )
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset) or (can_be_split(dataset) and not by_index):
        return
    name = type(dataset).__name__
    if can_be_split(dataset):
        reason = "its samples have no numbers, by which predictions could be put in order"
        remedy = (
            "predict with devices=1, or let each rank keep its own: "
            "Trainer(use_distributed_sampler=False).predict(..., gather=None)."
        )
    else:
        reason = "it has no indices to split, so every rank would see all of it"
        remedy = (
            f"give {name} a method shard(num_shards, index) that returns that part of the data; or set "
            "shards_itself = True on it, and read rankwise.data.shard_info() in its __iter__."
        )
    raise UnshardableLoaderError(
        loader=f"A data loader over the iterable dataset {name}", reason=reason, remedy=remedy
    )


def is_shardable(loader: Any) -> bool:
    """Return whether `loader` is a data loader with an index stream to split."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def is_split(loader: DataLoader[Any]) -> bool:
    """Return whether the user has split `loader` over the ranks already."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, (DistributedSampler, ShardedSampler)) for sampler in samplers)


def _drops_last(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.drop_last


def with_stream(loader: Loader, stream: Any, sampler: Any = None) -> Loader:
    """Return a copy of `loader` that reads its indices, or its batches of indices, from `stream`."""
    kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return _changed(loader, **{kind: stream}, **({} if sampler is None else {"sampler": sampler}))


def _changed(loader: Loader, **attributes: Any) -> Loader:
    changed = copy.copy(loader)
    attributes["_iterator"] = None  # persistent workers belong to the original
    for name, value in attributes.items():
        object.__setattr__(changed, name, value)  # DataLoader itself forbids it after its constructor
    return changed

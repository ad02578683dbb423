"""Split a data loader over ranks, on its stream of indices; the loader itself is copied, never rebuilt."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from typing_extensions import TypeVar

from rankwise.data.iterable import ShardedIterable, can_be_split
from rankwise.data.sampler import LimitedSampler, ShardedSampler, Uneven, has_length, own_seed
from rankwise.data.user_sharding import (
    check_interleaved_by_batches,
    check_place,
    deals_as_torch_does,
    is_split,
    order_of_data,
    repeating,
    sampler_of,
    split_of,
)
from rankwise.errors import UnshardableLoaderError

__all__ = [
    "check_shardable",
    "in_dataset_order",
    "is_shardable",
    "order_seed",
    "shard_for_evaluation",
    "shard_for_prediction",
    "shard_for_training",
    "with_stream",
]

Loader = TypeVar("Loader", bound="DataLoader[Any]")


def shard_for_training(
    loader: Loader, num_replicas: int, rank: int, *, seed: int | None = None, uneven: Uneven | None = None
) -> Loader:
    """Return `loader` with this rank's samples, shuffled if they were; by default as many on every rank.

    Samples that do not divide evenly are repeated from the beginning, or left out if the loader drops its
    last batch; or what `uneven` says. With a batch sampler of the user's own, whole batches are dealt out
    instead of samples. A loader that is split already stays so.

    Args:
        loader: the loader.
        num_replicas: over how many ranks it is split.
        rank: whose part is wanted.
        seed: gives a shuffled order, the same on all ranks; by default `order_seed(loader)`, or 0.
        uneven: what happens to samples that do not divide evenly; see `ShardedSampler`.

    Raises:
        UnshardableLoaderError: when the loader has no index stream, or is split already for another rank.
    """
    default: Uneven = "drop" if _drops_last(loader) else "pad"
    return _sharded(loader, num_replicas, rank, seed=seed, uneven=default if uneven is None else uneven)


def shard_for_evaluation(loader: Loader, num_replicas: int, rank: int, *, seed: int | None = None) -> Loader:
    """Return `loader` with this rank's samples, each sample on exactly one rank; lengths may differ by one.

    What the ranks see together is what one process sees: a loader that drops its last batch leaves the same
    samples out, and a `DistributedSampler` of the user's does not repeat any.

    Raises:
        UnshardableLoaderError: when the loader has no index stream, and its data no way to be split; when it
            is split already for another rank, or with repetitions that cannot be told from the rest.
    """
    if is_shardable(loader) and isinstance(sampler := split_of(loader), DistributedSampler):
        check_place(loader, num_replicas, rank)
        return _without_padding(loader, sampler)
    if is_shardable(loader) and type(loader.batch_sampler) is BatchSampler and not is_split(loader):
        loader = _without_last_batch(loader, loader.batch_sampler)
    return _sharded(loader, num_replicas, rank, seed=seed, uneven="keep")


def shard_for_prediction(loader: Loader, num_replicas: int, rank: int, *, seed: int | None = None) -> Loader:
    """Return `loader` with the batches `rank`, `rank + num_replicas`, ... of those that it has.

    Outputs of `predict_step` are opaque, so only whole batches can be put back in order afterwards. They come
    in the order of the data: see `in_dataset_order`.

    Raises:
        UnshardableLoaderError: when the loader has no index stream, or is split already by samples.
    """
    check_shardable(loader, by_index=True)
    loader = in_dataset_order(loader)
    if is_split(loader):
        check_interleaved_by_batches(loader)
        check_place(loader, num_replicas, rank)
        return loader
    stream = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return with_stream(loader, ShardedSampler(stream, num_replicas, rank, seed=_seed_for(loader, seed)))


def in_dataset_order(loader: Loader) -> Loader:
    """Return `loader` in the order of the data, if torch's own samplers shuffle or split it.

    So `DataLoader(shuffle=True)` and a `DistributedSampler` give way to a `SequentialSampler`. Samplers that
    choose (by weights, a subset, with replacement) and those of the user's own are left as they are.
    """
    sampler = order_of_data(loader) if is_shardable(loader) else None
    return loader if sampler is None else _resampled(loader, sampler)


def order_seed(loader: Any) -> int | None:
    """Return the seed of a loader's order, where the user's own `generator` decides it; otherwise None."""
    if not is_shardable(loader) or is_split(loader):
        return None
    return own_seed(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _seed_for(loader: DataLoader[Any], seed: int | None) -> int:
    return (order_seed(loader) or 0) if seed is None else seed


def _sharded(loader: Loader, num_replicas: int, rank: int, *, seed: int | None, uneven: Uneven) -> Loader:
    check_shardable(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _changed(loader, dataset=ShardedIterable(loader.dataset, num_replicas, rank))
    if is_split(loader):
        check_place(loader, num_replicas, rank)
        return loader
    samples = sampler_of(loader)
    dealt = loader.batch_sampler if samples is None else samples
    sampler = ShardedSampler(dealt, num_replicas, rank, seed=_seed_for(loader, seed), uneven=uneven)
    return with_stream(loader, sampler) if samples is None else _resampled(loader, sampler)


def _without_padding(loader: Loader, sampler: Any) -> Loader:
    """Return a loader that the user has split without the samples that were repeated to make parts even.

    Raises:
        UnshardableLoaderError: when nobody knows which those are.
    """
    samples = sampler_of(loader)
    if sampler.total_size <= len(sampler.dataset) or isinstance(samples, LimitedSampler):
        return loader
    if samples is not sampler or not deals_as_torch_does(sampler):
        raise repeating(sampler)
    return _resampled(
        loader, LimitedSampler(sampler, len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas)))
    )


def _without_last_batch(loader: Loader, batches: BatchSampler) -> Loader:
    """Return a loader that drops nothing, of those samples that `loader` has in whole batches."""
    if not batches.drop_last or not has_length(batches.sampler):
        return loader
    own = LimitedSampler(batches.sampler, len(batches) * batches.batch_size)
    return _resampled(loader, own, drop_last=False)


def _resampled(loader: Loader, sampler: Any, **changes: Any) -> Loader:
    """Return a copy of `loader` whose samples, or torch's own batches of them, are what `sampler` yields."""
    if loader.batch_sampler is None:
        return with_stream(loader, sampler)
    resampled: Any = copy.copy(loader.batch_sampler)
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


def _drops_last(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    batches = loader.batch_sampler
    return bool(batches.drop_last) if type(batches) is BatchSampler else loader.drop_last


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

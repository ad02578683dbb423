"""Split a data loader over ranks, on its stream of indices; the loader itself is copied, never rebuilt."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from typing_extensions import TypeVar

from rankwise.data.sampler import ShardedSampler, Uneven
from rankwise.errors import UnshardableLoaderError

__all__ = [
    "check_shardable",
    "is_shardable",
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

    Raises:
        UnshardableLoaderError: when the loader has no index stream.
    """
    return _sharded(loader, num_replicas, rank, seed=seed, uneven="keep")


def shard_for_prediction(loader: Loader, num_replicas: int, rank: int, *, seed: int = 0) -> Loader:
    """Return `loader` with the batches `rank`, `rank + num_replicas`, ... of those that it has.

    Outputs of `predict_step` are opaque, so only whole batches can be put back in order afterwards.

    Raises:
        UnshardableLoaderError: when the loader has no index stream.
    """
    check_shardable(loader)
    if _is_sharded(loader):
        return loader
    stream = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return with_stream(loader, ShardedSampler(stream, num_replicas, rank, seed=seed))


def _sharded(loader: Loader, num_replicas: int, rank: int, *, seed: int, uneven: Uneven) -> Loader:
    check_shardable(loader)
    if _is_sharded(loader):
        return loader
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return with_stream(loader, ShardedSampler(batches, num_replicas, rank, seed=seed, uneven=uneven))
    sampler = ShardedSampler(loader.sampler, num_replicas, rank, seed=seed, uneven=uneven)
    if batches is None:
        return with_stream(loader, sampler)
    resampled = copy.copy(batches)
    resampled.sampler = sampler
    return with_stream(loader, resampled, sampler)


def check_shardable(loader: Any) -> None:
    """Make sure that `loader` can be split over ranks.

    Raises:
        UnshardableLoaderError: when it is no data loader, or has no index stream.
    """
    remedy = (
        "split the data by rank where it is read (dist.get_rank(), or module.global_rank), and pass "
        "Trainer(use_distributed_sampler=False)."
    )
    if not isinstance(loader, DataLoader):
        raise UnshardableLoaderError(
            loader=type(loader).__name__, reason="it is not a torch DataLoader", remedy=remedy
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnshardableLoaderError(
            loader=f"A data loader over the iterable dataset {type(loader.dataset).__name__}",
            reason="it has no indices to split, so every rank would see all of it",
            remedy=f"in {type(loader.dataset).__name__}.__iter__, {remedy}",
        )


def is_shardable(loader: Any) -> bool:
    """Return whether `loader` is a data loader with an index stream to split."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _is_sharded(loader: DataLoader[Any]) -> bool:
    """Return whether the user has split `loader` over the ranks already."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, (DistributedSampler, ShardedSampler)) for sampler in samplers)


def _drops_last(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.drop_last


def with_stream(loader: Loader, stream: Any, sampler: Any = None) -> Loader:
    """Return a copy of `loader` that reads its indices, or its batches of indices, from `stream`."""
    changed = copy.copy(loader)
    attributes = {"_iterator": None}  # persistent workers belong to the original
    if loader.batch_sampler is None:
        attributes["sampler"] = stream
    else:
        attributes["batch_sampler"] = stream
    if sampler is not None:
        attributes["sampler"] = sampler
    for name, value in attributes.items():
        object.__setattr__(changed, name, value)  # DataLoader itself forbids it after its constructor
    return changed

"""Split a data loader over the ranks by its indices; the loader itself is copied, never rebuilt."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from rankwise.data.iterable import ShardedIterable, can_be_split
from rankwise.data.sampler import LimitedSampler, ShardedSampler, Uneven, length_of, own_seed, with_wrapped
from rankwise.errors import UnshardableLoaderError

Loader = TypeVar("Loader", bound="DataLoader[Any]")
SplitSampler = DistributedSampler[Any] | ShardedSampler

_UNSPLIT_REMEDY = "pass a loader that is not split: rankwise splits any."
_OWN_PREDICTIONS = (
    "let each rank keep its own predictions: "
    "Trainer(use_distributed_sampler=False).predict(..., gather=None)."
)


def shard_for_training(
    loader: Loader, num_replicas: int, rank: int, *, seed: int | None = None, uneven: Uneven | None = None
) -> Loader:
    """Return `loader` with this rank's samples, in a shuffled order if the loader shuffles.

    By default every rank gets the same number of samples: the first ones are repeated, or the last ones left
    out if the loader drops its last batch. For a loader with a user's own batch sampler, whole batches are
    distributed instead of samples. A loader that is already split does not change.

    Args:
        loader: the loader.
        num_replicas: the number of ranks.
        rank: the rank whose part is returned.
        seed: determines a shuffled order, the same on all ranks; by default `order_seed(loader)`, or 0.
        uneven: what happens to samples that do not divide evenly; see `ShardedSampler`.

    Raises:
        UnshardableLoaderError: when the loader has no indices, or is already split for another rank.
    """
    check_shardable(loader)
    if isinstance(loader.dataset, IterableDataset):
        return with_attributes(loader, dataset=ShardedIterable(loader.dataset, num_replicas, rank))
    if _is_split_for(loader, num_replicas, rank):
        return loader
    samples = _sampler_of(loader)
    whole = loader.batch_sampler if samples is None else samples
    if uneven is None:
        batches = loader.batch_sampler
        uneven = "drop" if type(batches) is BatchSampler and batches.drop_last else "pad"
    sampler = ShardedSampler(whole, num_replicas, rank, seed=_seed_for(loader, seed), uneven=uneven)
    return with_indices_from(loader, sampler) if samples is None else _resampled(loader, sampler)


def shard_for_evaluation(loader: Loader, num_replicas: int, rank: int, *, seed: int | None = None) -> Loader:
    """Return `loader` with this rank's samples, each sample on exactly one rank; lengths may differ by one.

    The ranks together get the samples of one process: a loader that drops its last batch leaves out the same
    samples, and a user's `DistributedSampler` does not repeat any.

    Raises:
        UnshardableLoaderError: when neither the loader's indices nor its data can be split, or it is already
            split for another rank, or with repeated samples that cannot be identified.
    """
    sampler = _split_sampler_of(loader) if is_shardable(loader) else None
    if isinstance(sampler, DistributedSampler) and _is_split_for(loader, num_replicas, rank):
        return _without_padding(loader, sampler)
    if sampler is None and is_shardable(loader) and type(loader.batch_sampler) is BatchSampler:
        loader = _without_last_batch(loader, loader.batch_sampler)
    return shard_for_training(loader, num_replicas, rank, seed=seed, uneven="keep")


def shard_for_prediction(loader: Loader, num_replicas: int, rank: int, *, seed: int | None = None) -> Loader:
    """Return `loader` with its batches `rank`, `rank + num_replicas`, ..., in the order of the data.

    Outputs of `predict_step` are opaque, so only whole batches can be put in order afterwards; see
    `in_dataset_order`.

    Raises:
        UnshardableLoaderError: when the loader has no indices, or is already split by samples.
    """
    check_shardable(loader, by_index=True)
    loader = in_dataset_order(loader)
    check_interleaved_by_batches(loader)
    if _is_split_for(loader, num_replicas, rank):
        return loader
    sampler = ShardedSampler(_index_stream(loader), num_replicas, rank, seed=_seed_for(loader, seed))
    return with_indices_from(loader, sampler)


def _without_padding(loader: Loader, sampler: Any) -> Loader:
    """Return a loader with a user's `DistributedSampler`, without the samples that the sampler repeats."""
    samples = _sampler_of(loader)
    if sampler.total_size <= len(sampler.dataset) or isinstance(samples, LimitedSampler):
        return loader
    if samples is not sampler or not _is_torch_order(sampler):
        raise _split_error(
            sampler,
            "samples are repeated so that parts are even, and which ones cannot be told from outside",
            f"{_UNSPLIT_REMEDY} Or give the sampler drop_last=True; or keep it as it is, with "
            "Trainer(use_distributed_sampler=False).",
        )
    count = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))
    return _resampled(loader, LimitedSampler(sampler, count))


def _without_last_batch(loader: Loader, batches: BatchSampler) -> Loader:
    """Return a loader of the samples in whole batches that does not drop its last batch."""
    if not batches.drop_last or math.isinf(length_of(batches.sampler)):
        return loader
    whole = LimitedSampler(batches.sampler, len(batches) * batches.batch_size)
    return _resampled(loader, whole, drop_last=False)


def in_dataset_order(loader: Loader) -> Loader:
    """Return `loader` in the order of the data, if torch's own samplers shuffle or split it.

    That replaces the sampler of `DataLoader(shuffle=True)` and a `DistributedSampler` by a
    `SequentialSampler`. Samplers that select samples (by weights, a subset, with replacement) and users' own
    stay.
    """
    sampler = _sampler_of(loader) if is_shardable(loader) else None
    source: Any = None
    if isinstance(sampler, DistributedSampler) and _is_torch_order(sampler):
        source = sampler.dataset
    elif type(sampler) is RandomSampler and not sampler.replacement:
        source = sampler.data_source if sampler.num_samples == len(sampler.data_source) else None
    return loader if source is None else _resampled(loader, SequentialSampler(source))


def is_in_dataset_order(loader: DataLoader[Any]) -> bool:
    """Return whether torch's own samplers read the data in its order."""
    return type(_sampler_of(loader)) is SequentialSampler


def order_seed(loader: Any) -> int | None:
    """Return the seed of a loader's order if the user's own `generator` determines it; otherwise None."""
    if not is_shardable(loader) or is_split(loader):
        return None
    return own_seed(_index_stream(loader))


def _seed_for(loader: DataLoader[Any], seed: int | None) -> int:
    return (order_seed(loader) or 0) if seed is None else seed


def is_split(loader: DataLoader[Any]) -> bool:
    """Return whether the user has already split `loader` over the ranks."""
    return _split_sampler_of(loader) is not None


def is_split_for_one_rank(loader: Any, *, keeps_order: bool) -> bool:
    """Return whether a loader is split even for one rank: to check it, or for the order of several ranks."""
    if not is_shardable(loader):
        return False
    return is_split(loader) or not (keeps_order and is_in_dataset_order(loader))


def batches_before_split(loader: DataLoader[Any]) -> Any:
    """Return the batches of all ranks: those that a `ShardedSampler` distributes, or the loader."""
    stream = _index_stream(loader)
    return stream.sampler if isinstance(stream, ShardedSampler) else loader


def check_interleaved_by_batches(loader: DataLoader[Any]) -> None:
    """Check that a loader that is split distributes whole batches once, so that order can be restored."""
    sampler = _split_sampler_of(loader)
    if sampler is None:
        return
    if sampler is _index_stream(loader) and isinstance(sampler, ShardedSampler) and sampler.is_exact:
        return
    raise _split_error(
        sampler,
        "it is split already, and not by whole batches, so predictions could not be put in order",
        f"{_UNSPLIT_REMEDY} Or {_OWN_PREDICTIONS}",
    )


def _is_split_for(loader: DataLoader[Any], num_replicas: int, rank: int) -> bool:
    """Return whether a loader is split already; raise if it has another rank's part."""
    sampler = _split_sampler_of(loader)
    if sampler is None:
        return False
    if (sampler.num_replicas, sampler.rank) == (num_replicas, rank):
        return True
    raise _split_error(
        sampler,
        f"it has part {sampler.rank} of {sampler.num_replicas} already, but this rank's is part {rank} of "
        f"{num_replicas}",
        f"{_UNSPLIT_REMEDY} Or make the sampler on each rank, in a hook such as train_dataloader(); or "
        "keep it, with Trainer(use_distributed_sampler=False).",
    )


def _split_error(sampler: SplitSampler, reason: str, remedy: str) -> UnshardableLoaderError:
    name = f"A data loader with a {type(sampler).__name__}"
    return UnshardableLoaderError(loader=name, reason=reason, remedy=remedy)


def _split_sampler_of(loader: DataLoader[Any]) -> SplitSampler | None:
    """Return the sampler that splits a loader over the ranks, however deep it is wrapped; or None."""
    for outer in (loader.sampler, loader.batch_sampler):
        for sampler in with_wrapped(outer):
            if isinstance(sampler, (DistributedSampler, ShardedSampler)):
                return sampler
    return None


def _is_torch_order(sampler: DistributedSampler[Any]) -> bool:
    return type(sampler).__iter__ is DistributedSampler.__iter__  # not a subclass's


def check_shardable(loader: Any, *, by_index: bool = False) -> None:
    """Check that `loader` can be split over the ranks; with `by_index`, that its order can be restored."""
    if not isinstance(loader, DataLoader):
        raise UnshardableLoaderError(
            loader=type(loader).__name__,
            reason="it is not a torch DataLoader",
            remedy="split the data by rank where it is read (dist.get_rank(), or module.global_rank), and "
            "pass Trainer(use_distributed_sampler=False).",
        )
    if not isinstance(loader.dataset, IterableDataset) or (can_be_split(loader.dataset) and not by_index):
        return
    name = type(loader.dataset).__name__
    reason = "it has no indices to split, so every rank would see all of it"
    remedy = (
        f"give {name} a method shard(num_shards, index) that returns that part of the data; or set "
        "shards_itself = True on it, and read rankwise.data.shard_info() in its __iter__."
    )
    if can_be_split(loader.dataset):
        reason = "its samples have no numbers, by which predictions could be put in order"
        remedy = f"predict with devices=1, or {_OWN_PREDICTIONS}"
    raise UnshardableLoaderError(
        loader=f"A data loader over the iterable dataset {name}", reason=reason, remedy=remedy
    )


def is_shardable(loader: Any) -> bool:
    """Return whether `loader` is a data loader with indices to split."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def with_indices_from(loader: Loader, stream: Any, sampler: Any = None) -> Loader:
    """Return a copy of `loader` that reads its indices, or its batches of indices, from `stream`."""
    kind = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return with_attributes(loader, **{kind: stream}, **({} if sampler is None else {"sampler": sampler}))


def _index_stream(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader's samples; None for a batch sampler that is not torch's own."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else None


def _resampled(loader: Loader, sampler: Any, **changes: Any) -> Loader:
    """Return a copy of `loader` that gets its samples, or torch's batches of them, from `sampler`."""
    if loader.batch_sampler is None:
        return with_indices_from(loader, sampler)
    resampled: Any = copy.copy(loader.batch_sampler)
    resampled.sampler = sampler
    for name, value in changes.items():
        setattr(resampled, name, value)
    return with_indices_from(loader, resampled, sampler)


def with_attributes(loader: Loader, **attributes: Any) -> Loader:
    """Return a copy of `loader` with other attributes, also those that its constructor fixes."""
    changed = copy.copy(loader)
    attributes["_iterator"] = None  # persistent workers belong to the original
    for name, value in attributes.items():
        object.__setattr__(changed, name, value)  # DataLoader itself forbids it after its constructor
    return changed

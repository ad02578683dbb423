"""What a user has split over the ranks already: by which sampler, for which rank, and in what order."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from rankwise.data.sampler import ShardedSampler, with_wrapped
from rankwise.errors import UnshardableLoaderError

__all__ = [
    "batches_before_split",
    "check_interleaved_by_batches",
    "check_place",
    "deals_as_torch_does",
    "is_split",
    "order_of_data",
    "repeating",
    "sampler_of",
    "split_of",
]

Split = DistributedSampler[Any] | ShardedSampler
_REMEDY = "pass a loader that is not split: rankwise splits any."


def split_of(loader: DataLoader[Any]) -> Split | None:
    """Return the sampler by which a loader is split over the ranks already, wherever it is; or None."""
    for outer in (loader.sampler, loader.batch_sampler):
        for sampler in with_wrapped(outer):
            if isinstance(sampler, (DistributedSampler, ShardedSampler)):
                return sampler
    return None


def is_split(loader: DataLoader[Any]) -> bool:
    """Return whether the user has split `loader` over the ranks already."""
    return split_of(loader) is not None


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler whose items are the loader's samples, one after another; None where nobody knows.

    That is so without batches, and with those that torch's own `BatchSampler` makes.
    """
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else None


def batches_before_split(loader: DataLoader[Any]) -> Any:
    """Return the batches that all ranks share: the loader, or the stream from which its own are dealt."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return outer.sampler if isinstance(outer, ShardedSampler) else loader


def check_place(loader: DataLoader[Any], num_replicas: int, rank: int) -> None:
    """Make sure that a loader that is split has the part that belongs to this rank.

    Raises:
        UnshardableLoaderError: when it has another one, so that data would be missing or come twice.
    """
    sampler = split_of(loader)
    if sampler is None or (sampler.num_replicas, sampler.rank) == (num_replicas, rank):
        return
    raise _unshardable(
        sampler,
        f"it has part {sampler.rank} of {sampler.num_replicas} already, but this rank's is part {rank} of "
        f"{num_replicas}",
        f"{_REMEDY} Or make the sampler on each rank, in a hook such as train_dataloader(); or keep it, with "
        "Trainer(use_distributed_sampler=False).",
    )


def order_of_data(loader: DataLoader[Any]) -> Any:
    """Return a sampler in the order of the data, where torch's own shuffle or split them; otherwise None."""
    sampler = sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and deals_as_torch_does(sampler):
        return SequentialSampler(sampler.dataset)  # type: ignore[arg-type]  # torch's takes its length too
    if type(sampler) is RandomSampler and not sampler.replacement:
        whole = sampler.data_source
        return SequentialSampler(whole) if sampler.num_samples == len(whole) else None
    return None


def deals_as_torch_does(sampler: DistributedSampler[Any]) -> bool:
    """Return whether which samples there are is torch's own choice, not a subclass's."""
    return type(sampler).__iter__ is DistributedSampler.__iter__


def check_interleaved_by_batches(loader: DataLoader[Any]) -> None:
    """Make sure that whole batches of a loader were dealt out, if it is split: then order can be restored.

    Raises:
        UnshardableLoaderError: when samples were, or samples or batches are repeated.
    """
    sampler = split_of(loader)
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if sampler is None or (sampler is outer and isinstance(sampler, ShardedSampler) and sampler.is_exact):
        return
    raise _unshardable(
        sampler,
        "it is split already, and not by whole batches, so predictions could not be put in order",
        f"{_REMEDY} Or let each rank keep its own predictions: "
        "Trainer(use_distributed_sampler=False).predict(..., gather=None).",
    )


def repeating(sampler: Split) -> UnshardableLoaderError:
    """Return the error for a sampler that repeats samples, but nobody knows which."""
    return _unshardable(
        sampler,
        "samples are repeated so that parts are even, and which ones cannot be told from outside",
        f"{_REMEDY} Or give the sampler drop_last=True; or keep it as it is, with "
        "Trainer(use_distributed_sampler=False).",
    )


def _unshardable(sampler: Split, reason: str, remedy: str) -> UnshardableLoaderError:
    name = f"A data loader with a {type(sampler).__name__}"
    return UnshardableLoaderError(loader=name, reason=reason, remedy=remedy)

"""Which batches a rank sees in a stage: loaders found, split over the ranks, limited."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import final

from rankwise.data import (
    batches_before_split,
    check_dealt_by_batches,
    check_shardable,
    in_dataset_order,
    is_shardable,
    is_split,
    shard_for_evaluation,
    shard_for_prediction,
    shard_for_training,
    tell_epoch,
)
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer.trainer import Trainer

__all__ = [
    "LoaderShare",
    "as_list",
    "check_can_be_gathered",
    "check_loaders",
    "has_certain_length",
    "length_of",
    "limited",
    "share_for",
]

_SHARDERS: dict[str, Callable[..., Any]] = {
    "train": shard_for_training,
    "validate": shard_for_evaluation,
    "test": shard_for_evaluation,
    "predict": shard_for_prediction,
}


@final
@dataclass
class LoaderShare:
    """One rank's batches of a loader.

    Attributes:
        loader: this rank's part of it.
        num_batches: how many of its batches are run; `inf` where nobody knows.
        is_certain: whether that number is known; where it is not, it is the most that are run.
    """

    loader: Iterable[Any]
    num_batches: float
    is_certain: bool = True

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield each batch, and whether it is the last."""
        if self.num_batches == 0:
            return
        batches = islice(self.loader, None if math.isinf(self.num_batches) else int(self.num_batches))
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)  # one ahead, to know which is the last
            yield batch, following is _END
            batch = following

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and iterable data, which shuffle differently in each epoch."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        dataset = getattr(self.loader, "dataset", None)
        iterable = dataset if isinstance(dataset, IterableDataset) else None
        tell_epoch(epoch, batch_sampler, getattr(self.loader, "sampler", None), iterable)


_END = object()


def as_list(loaders: Any) -> list[Any]:
    """Return several loaders as they are given, or the one as a list of one."""
    is_several = isinstance(loaders, (list, tuple)) and all(isinstance(item, DataLoader) for item in loaders)
    return list(loaders) if is_several else [loaders]


def check_loaders(trainer: Trainer, phase: str, loaders: Any) -> None:
    """Make sure, before anything starts, that the loaders of a phase can be split over the ranks.

    Raises:
        UnshardableLoaderError: when one cannot.
    """
    if loaders is not None and trainer.use_distributed_sampler and trainer.world_size > 1:
        for loader in as_list(loaders):
            check_shardable(loader, by_index=phase == "predict")


def share_for(trainer: Trainer, phase: str, loader: Any, seed: int) -> LoaderShare:
    """Return this rank's batches of `loader` in a phase: `train`, `validate`, `test` or `predict`.

    Raises:
        UnshardableLoaderError: when the loader cannot be split over the ranks.
        ConfigurationError: for a fraction of a loader without length.
    """
    limit = trainer.limits[phase]
    place = trainer.strategy.distributed_sampler_kwargs
    if trainer.use_distributed_sampler and phase == "predict":
        loader = in_dataset_order(loader)
    is_dealt_out = trainer.use_distributed_sampler and (
        trainer.world_size > 1 or _is_ours_alone(phase, loader)
    )
    options: dict[str, Any] = (
        {"uneven": "keep"} if phase == "train" and trainer.uneven_inputs == "join" else {}
    )
    share = _SHARDERS[phase](loader, **place, seed=seed, **options) if is_dealt_out else loader
    if not is_dealt_out or phase != "predict":
        return LoaderShare(share, limited(length_of(share), limit), has_certain_length(share))
    # Predictions are dealt out by batches, so that the limit is one of the whole loader, whoever does that.
    whole = limited(length_of(batches_before_split(loader)), limit)
    own = whole if math.isinf(whole) else len(range(place["rank"], int(whole), place["num_replicas"]))
    return LoaderShare(share, own)


def _is_ours_alone(phase: str, loader: Any) -> bool:
    """Whether one rank has a loader dealt out like several: its part is checked, if the user has split it.

    It draws its training data like they do, so that another number of ranks can go on from it.
    """
    if not is_shardable(loader):
        return False
    return is_split(loader) or (phase == "train" and not math.isinf(length_of(loader)))


def check_can_be_gathered(trainer: Trainer, shares: list[LoaderShare]) -> None:
    """Make sure that predictions can be put in order, also where the user splits.

    Raises:
        UnshardableLoaderError: when a loader is known to be split by samples.
    """
    for loader in (share.loader for share in shares if trainer.world_size > 1):
        if isinstance(loader, DataLoader) and is_shardable(loader):
            check_dealt_by_batches(loader)


def length_of(loader: Any) -> float:
    """Return how many batches a loader has; `inf` where nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # what iterable data sets and generators raise
        return math.inf


def has_certain_length(loader: Any) -> bool:
    """Return whether a loader's length is what comes; of iterable data it is but a claim."""
    is_iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return not is_iterable and not math.isinf(length_of(loader))


def limited(length: float, limit: float) -> float:
    """Return how many of `length` batches a limit, a number or a fraction, leaves.

    Raises:
        ConfigurationError: for a fraction of a loader without length.
    """
    if isinstance(limit, int):
        return min(length, limit)
    if limit in (0.0, 1.0):
        return length if limit else 0
    if math.isinf(length):
        raise ConfigurationError(
            message=f"A fraction ({limit}) of a loader without length cannot be taken.",
            remedy="limit it to a number of batches, such as limit_train_batches=100.",
        )
    return int(length * limit)

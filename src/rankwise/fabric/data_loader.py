"""`FabricDataLoader`: this rank's batches of a loader, in another order in each iteration, on its device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader, SequentialSampler

from rankwise.data import shard_for_evaluation, shard_for_training
from rankwise.data.batches import (
    set_epoch_of_loader,
    sharded_sampler_of,
    start_with_seed,
    with_batch_stream,
)
from rankwise.data.sampler import length_of
from rankwise.data.sharding import is_split_for_one_rank
from rankwise.errors import ConfigurationError
from rankwise.ranks import warn
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import agree_on_loaders, check_same_order, replica_of


@final
class FabricDataLoader:
    """A loader that `Fabric.setup_dataloaders` has set up: all other attributes are the original loader's.

    Attributes:
        epoch: the number of the next iteration, which determines its order; samplers and iterable data sets
            that have `set_epoch` get it.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, seed: int | None, move_to_device: bool) -> None:
        self.loader = loader
        self.epoch = 0
        self._strategy = strategy
        self._seed = seed
        self._move_to_device = move_to_device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        self.epoch += 1
        set_epoch_of_loader(epoch, self.loader)
        if self._seed is None:
            batches = iter(self.loader)
        else:
            check_same_order(self._strategy, "data", [self.loader])
            seed = (self._seed, epoch, self._strategy.global_rank)
            batches = start_with_seed(self.loader, self.loader.__iter__, *seed)
        for batch in batches:
            yield self._strategy.batch_to_device(batch) if self._move_to_device else batch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def fabric_data_loaders(
    loaders: tuple[DataLoader[Any], ...],
    strategy: Strategy,
    *,
    use_distributed_sampler: bool,
    move_to_device: bool,
    each_sample_once: bool,
) -> list[FabricDataLoader]:
    """Return this rank's part of each loader. Collective: every rank must call this."""
    if not use_distributed_sampler:
        return [
            FabricDataLoader(loader, strategy, seed=None, move_to_device=move_to_device) for loader in loaders
        ]
    default = strategy.broadcast(torch.initial_seed())
    seeds = agree_on_loaders(strategy, "data", list(loaders), default=default, is_split_here=True)
    split = shard_for_evaluation if each_sample_once else shard_for_training
    prepared = []
    for loader, seed in zip(loaders, seeds, strict=True):
        shard = loader
        if strategy.world_size > 1 or is_split_for_one_rank(loader, keeps_order=True):
            shard = split(loader, **replica_of(strategy), seed=seed)
        if each_sample_once:
            _check_no_rank_is_empty(shard)
        elif strategy.is_global_zero:
            _warn_of_repeated_samples(shard)
        stream, own_seed = with_batch_stream(shard, seed=seed, rank=strategy.global_rank)
        prepared.append(FabricDataLoader(stream, strategy, seed=own_seed, move_to_device=move_to_device))
    return prepared


def _check_no_rank_is_empty(loader: DataLoader[Any]) -> None:
    """Raise ConfigurationError if a rank has no sample: it could not take part in what the others average."""
    sampler = sharded_sampler_of(loader)
    if sampler is None or math.isinf(length_of(sampler.sampler)):
        return
    last = sampler.num_replicas - 1
    if not sampler.length_of(last):
        raise ConfigurationError(
            message=f"each_sample_once=True leaves no sample for global_rank {last}.",
            facts=f"there are {length_of(sampler.sampler)} for {sampler.num_replicas} ranks.",
            remedy="use fewer ranks or more samples, or leave each_sample_once out.",
        )


def _warn_of_repeated_samples(loader: DataLoader[Any]) -> None:
    """Warn if a loader that reads the data in order, perhaps to evaluate, gets samples twice."""
    sampler = sharded_sampler_of(loader)
    if sampler is None or sampler.uneven != "pad" or type(sampler.sampler) is not SequentialSampler:
        return
    length, ranks = len(sampler.sampler), sampler.num_replicas
    if length % ranks:
        warn(
            f"{-length % ranks} of {length} samples are read twice, so that all {ranks} ranks have as many. "
            "To evaluate on each sample once: fabric.setup_dataloaders(loader, each_sample_once=True).",
        )

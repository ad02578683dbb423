"""How a strategy splits loaders over the ranks: which part is this rank's, in which order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset

from rankwise.data.batches import sharded_sampler_of
from rankwise.data.sampler import length_of
from rankwise.data.sharding import is_shardable, is_split, order_seed
from rankwise.errors import ConfigurationError
from rankwise.nested import walked
from rankwise.strategies.agreement import check_ranks_agree

if TYPE_CHECKING:
    from rankwise.strategies.base import Strategy


def replica_of(strategy: Strategy) -> dict[str, int]:
    """Return which part of the data is this rank's, as keywords of the functions that split loaders."""
    replica = strategy.distributed_sampler_kwargs
    if set(replica) != {"num_replicas", "rank"}:
        raise ConfigurationError(
            message=f"{type(strategy).__name__}.distributed_sampler_kwargs has the keys {sorted(replica)}.",
            facts="it says how many parts the data have, and which one is this rank's.",
            remedy='return {"num_replicas": ..., "rank": ...}. Give shuffle and drop_last to the DataLoader.',
        )
    return replica


def fingerprint_of_loaders(words: str, loaders: list[Any], is_split_here: bool) -> dict[str, str]:
    """Return the facts of loaders that must be equal: number and, unless split, lengths and subsets' indices.

    `words` names the loaders in messages, such as `"training"`.
    """
    facts = {f"the number of {words} loaders": str(len(loaders))}
    for number, loader in enumerate(loaders if is_split_here else []):
        if is_shardable(loader) and not is_split(loader):
            name = f"the {words} loader" if len(loaders) == 1 else f"{words} loader {number}"
            facts[name] = f"{length_of(loader.dataset)} samples, {length_of(loader)} batches"
            if order_seed(loader) is not None:
                facts[name] += ", in the order of its own generator"
            if (digest := _digest_of_subsets(loader.dataset)) is not None:
                facts[f"which samples {name} has"] = digest
    return facts


def _digest_of_subsets(dataset: Any) -> str | None:
    """Return a digest of the indices of torch's subsets, nested ones too; None if there are none.

    It differs between processes that have each split their data at random, without a seed.
    """
    digest = None
    for each in walked(dataset, _parts_of):
        if isinstance(each, Subset):
            digest = digest or hashlib.blake2b(digest_size=8)
            digest.update(repr([int(index) for index in each.indices]).encode())
    return None if digest is None else f"indices {digest.hexdigest()}"


def _parts_of(dataset: Any) -> list[Any] | None:
    if isinstance(dataset, Subset):
        return [dataset.dataset]
    return list(dataset.datasets) if isinstance(dataset, ConcatDataset) else None


def agree_on_loaders(
    strategy: Strategy, words: str, loaders: list[Any], *, default: int, is_split_here: bool
) -> list[int]:
    """Compare the ranks' loaders; return each one's order seed. Collective.

    That is the first rank's of its generator, or `default`. For `words` see `fingerprint_of_loaders`.
    """
    check_ranks_agree(strategy, fingerprint_of_loaders(words, loaders, is_split_here))
    own = [order_seed(loader) if is_split_here else None for loader in loaders]
    if any(seed is not None for seed in own):
        own = strategy.all_gather_object(own)[0]  # the first rank of the data-parallel group
    return [default if seed is None else seed for seed in own]


def check_same_order(strategy: Strategy, words: str, loaders: list[Any]) -> None:
    """Check that all ranks draw the same items from the user's own samplers. Collective if there are any."""
    facts = {}
    for number, loader in enumerate(loaders if strategy.world_size > 1 else []):
        sampler = sharded_sampler_of(loader)
        if sampler is not None and (digest := sampler.order_digest()) is not None:
            facts[f"what the sampler of {words} loader {number} draws"] = digest
    if facts:
        check_ranks_agree(strategy, facts)

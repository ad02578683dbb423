"""Compare or share the ranks' versions, weights, states, loaders and loss; return a rank's share of data."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from rankwise.data.batches import sharded_sampler_of
from rankwise.data.sampler import length_of
from rankwise.data.sharding import is_shardable, is_split, order_seed
from rankwise.errors import ConfigurationError, RankMismatchError
from rankwise.gradient_sync.parameters import share_tensors
from rankwise.nested import walked
from rankwise.process_group import rank_comparison
from rankwise.strategies.base import Strategy

_NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


def check_ranks_agree(
    strategy: Strategy,
    facts: Mapping[str, str],
    tensors: Mapping[str, Tensor] = _NO_TENSORS,
    when: str = "",
    averaging: str = "",
) -> None:
    """Make sure that all ranks have the same `facts` and bits of dense tensors, by name. Collective.

    `when` and `averaging` are for the text of `RankMismatchError`.
    """
    if strategy.world_size > 1 and not _are_same(strategy, {**_summary_of(tensors), **facts}):
        by_rank = strategy.all_gather_object({**rank_comparison.digests_of(tensors), **facts})
        raise RankMismatchError(rank_comparison.differences(dict(enumerate(by_rank))), when, averaging)


def _summary_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a value that is equal on all ranks if all digests are, and is faster to compute."""
    dense = {name: tensor for name, tensor in tensors.items() if rank_comparison.has_values(tensor)}
    kinds = [(name, each.dtype, tuple(each.shape)) for name, each in dense.items()]
    return {"kinds": repr(kinds), "values": rank_comparison.joint_digest(dense.values())}


def _are_same(strategy: Strategy, facts: dict[str, str]) -> bool:
    """Compare digests by one reduction of 32 bytes: all ranks have one if the highest is the lowest."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    highest, inverted_lowest = strategy.all_reduce(torch.stack([words, ~words]), reduce_op="max")
    return torch.equal(highest, ~inverted_lowest)


def share_model(strategy: Strategy, module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, but for those that DDP ignores. Collective."""
    if strategy.world_size == 1:
        return
    values = values_of(module, with_buffers=True)
    if not _are_same(strategy, _summary_of(values)):
        share_tensors(values.values(), strategy.data_parallel_group)
        check_ranks_agree(strategy, {}, values)


def values_of(module: nn.Module, *, with_buffers: bool) -> dict[str, Tensor]:
    """Return the parameters and buffers that ranks share, by what a message calls them."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    kinds: dict[str, Iterable[tuple[str, Tensor]]] = {"parameter": module.named_parameters()}
    if with_buffers:
        kinds["buffer"] = module.named_buffers()
    return {
        f"the values of {kind} {name!r}": value
        for kind, named in kinds.items()
        for name, value in named
        if name not in ignored
    }


def fingerprint_of(module: nn.Module, seed: int | None = None) -> dict[str, str]:
    """Return the facts that must be equal on all ranks that train a module; `seed` is `seed_everything`'s."""
    return {
        "the version of rankwise": sys.modules["rankwise"].__version__,
        "the version of torch": str(torch.__version__),
        "the version of Python": platform.python_version(),
        "the seed": "none" if seed is None else str(seed),
        **rank_comparison.facts_of_parameters(dict(module.named_parameters())),
    }


def share_states(strategy: Strategy, objects: Sequence[Any]) -> None:
    """Load rank 0's `state_dict()` of each object, such as a logger, on all ranks. Collective."""
    states = strategy.call_on_rank_zero(lambda: [each.state_dict() for each in objects])
    for each, state in zip(objects, states, strict=True):
        each.load_state_dict(state)


def mean_loss(strategy: Strategy, loss: Any, weight: Tensor | float) -> Any:
    """Return the weighted average of the ranks' losses, by which an optimizer decides what to do. Collective.

    What is not a number is returned as it is. A weight of 0 leaves out this rank's loss, even if it is NaN.
    """
    if not isinstance(loss, (Tensor, float, int)):
        return loss
    own = torch.as_tensor(loss).detach().reshape(())
    if strategy.world_size == 1:
        return own
    share = float(weight)
    pair = torch.tensor([0.0, share], dtype=torch.double, device=strategy.root_device)
    if share:
        pair[0] = own.to(pair) * share
    total = strategy.all_reduce(pair, reduce_op="sum")
    return total[0] / total[1] if total[1] else total[0]


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
    """Return a digest of the indices of torch's subsets, nested ones too; unseeded random splits differ."""
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
    """Compare the ranks' loaders; return each order seed: the first rank's, or `default`. Collective."""
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

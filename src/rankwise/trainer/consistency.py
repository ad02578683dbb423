"""Check that all ranks have the same versions, seed, module and data; and the same values, by digests."""

from __future__ import annotations

import hashlib
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise.data.batches import sharded_sampler_of
from rankwise.data.sampler import length_of
from rankwise.data.sharding import is_shardable, is_split, order_seed
from rankwise.errors import ConfigurationError, RankMismatchError
from rankwise.gradient_sync.parameters import parameters_of, share_tensors
from rankwise.process_group.digests import digests_of
from rankwise.process_group.rank_facts import differences, facts_of_parameters
from rankwise.trainer.data_loaders import PHASE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.state import LoopContext


def check_ranks_agree(strategy: Strategy, facts: dict[str, str]) -> None:
    """Make sure that all ranks have the same `facts`, descriptions by name. Collective."""
    if strategy.world_size == 1:
        return
    if not _are_same(strategy, facts):
        raise RankMismatchError(differences(strategy.all_gather_object(facts)))


def _are_same(strategy: Strategy, facts: dict[str, str]) -> bool:
    fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    return len(set(strategy.all_gather_object(fingerprint))) == 1


def share_model(strategy: Strategy, module: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, unless all ranks have the same ones. Collective.

    Those that DDP is configured to ignore are left alone.
    """
    if strategy.world_size == 1:
        return
    values = _values_of(module, with_buffers=True)
    if not _are_same(strategy, digests_of(values)):
        share_tensors(values.values(), strategy.data_parallel_group)
        check_ranks_agree(strategy, digests_of(values))


def check_values(context: LoopContext, *, with_buffers: bool = False) -> None:
    """Make sure that all ranks have the same parameters and optimizer states. Collective.

    Buffers are the same only where they have just been shared. Left out are what DDP is configured to ignore,
    and the states of sharded optimizers.

    Raises:
        RankMismatchError: names what differs, parameters first.
    """
    strategy, module = context.strategy, context.module
    if strategy.world_size == 1:
        return
    values = _values_of(module, with_buffers=with_buffers)
    compared = {id(tensor) for tensor in values.values()}
    ignored = {id(parameter) for parameter in module.parameters()} - compared
    for number, optimizer in enumerate(context.optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in ignored and not strategy.is_sharded(optimizer):
                label = f"parameter {place} of optimizer {number}"
                values |= _state_of(optimizer, parameter, label)
                if id(parameter) not in compared:
                    values[f"the values of {label}"] = parameter
    check_ranks_agree(strategy, digests_of(values))


def check_can_compare(strategy: Strategy, interval: int | None) -> None:
    """Refuse to compare models that differ between the ranks' averages on purpose."""
    if interval is not None and strategy.gradients.period is not None:
        raise ConfigurationError(
            message=f"check_ranks_every_n_steps={interval} cannot work with post-local SGD.",
            facts="between averages of the models, each rank has another one.",
            remedy="leave it out.",
        )


def _values_of(module: nn.Module, *, with_buffers: bool) -> dict[str, Tensor]:
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


def _state_of(optimizer: Optimizer, parameter: Tensor, label: str) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {f"{key} of {label}": value for key, value in state.items() if isinstance(value, Tensor)}


def fingerprint_of(module: nn.Module, seed: int | None = None) -> dict[str, str]:
    """Return what must be the same on every rank that trains a module; `seed` is `seed_everything`'s."""
    return {
        "the version of rankwise": sys.modules["rankwise"].__version__,
        "the version of torch": str(torch.__version__),
        "the version of Python": platform.python_version(),
        "the seed": "none" if seed is None else str(seed),
        **facts_of_parameters(dict(module.named_parameters())),
    }


def fingerprint_of_checkpoint(checkpoint: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the facts that must be the same of the checkpoint that each rank has found and loaded."""
    names = ("global_step", "epoch", "seed", "run_id")
    found = "none" if checkpoint is None else ", ".join(f"{name} {checkpoint.get(name)}" for name in names)
    return {"the checkpoint": found}


def fingerprint_of_loaders(phase: str, loaders: list[Any], is_split_here: bool) -> dict[str, str]:
    """Return what must be the same of a phase's loaders: their number, and their lengths unless split."""
    words = PHASE_NAMES[phase]
    facts = {f"the number of {words} loaders": str(len(loaders))}
    for number, loader in enumerate(loaders if is_split_here else []):
        if is_shardable(loader) and not is_split(loader):
            name = f"the {words} loader" if len(loaders) == 1 else f"{words} loader {number}"
            facts[name] = f"{length_of(loader.dataset)} samples, {length_of(loader)} batches"
            if order_seed(loader) is not None:
                facts[name] += ", in the order of its own generator"
    return facts


def agreed_order_seeds(
    strategy: Strategy, loaders: list[Any], *, default: int, is_split_here: bool
) -> list[int]:
    """Return each loader's order seed: the first rank's of its generator, or `default`. Collective."""
    own = [order_seed(loader) if is_split_here else None for loader in loaders]
    if any(seed is not None for seed in own):
        own = strategy.all_gather_object(own)[0]  # the first rank of the data-parallel group
    return [default if seed is None else seed for seed in own]


def check_same_order(strategy: Strategy, phase: str, loaders: list[Any]) -> None:
    """Make sure that all ranks draw the same from samplers of the user's own. Collective if there are any."""
    facts = {}
    for number, loader in enumerate(loaders if strategy.world_size > 1 else []):
        sampler = sharded_sampler_of(loader)
        if sampler is not None and (digest := sampler.order_digest()) is not None:
            facts[f"what the sampler of {PHASE_NAMES[phase]} loader {number} draws"] = digest
    if facts:
        check_ranks_agree(strategy, facts)

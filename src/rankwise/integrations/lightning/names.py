"""The names in Lightning's registries, and the rankwise strategy that a name or its arguments stand for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import strategies as trainer_strategies

from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.gradient_sync.options import resolve_sync_mode
from rankwise.registry import RegisteredStrategy, StrategyRegistry
from rankwise.strategies import AutoStrategy, DDPElasticStrategy, DDPStrategy, Strategy

_PREFIX = "rankwise_"


def register_strategies(for_trainer: type, for_fabric: type) -> None:
    """Register each of rankwise's DDP strategies under its name after `rankwise_`; again is nothing."""
    for registry, strategy in (
        (trainer_strategies.StrategyRegistry, for_trainer),
        (STRATEGY_REGISTRY, for_fabric),
    ):
        for name, entry in _ddp_strategies():
            description = f"rankwise: {entry.description}"
            registry.register(_PREFIX + name, partial(strategy, name), description, override=True)


def _ddp_strategies() -> Iterator[tuple[str, RegisteredStrategy]]:
    for name in StrategyRegistry.available_strategies():
        entry = StrategyRegistry.entry(name)
        if _can_start_ranks(entry.strategy):
            yield name, entry


def _can_start_ranks(strategy: type[Strategy]) -> bool:
    return issubclass(strategy, DDPStrategy) and not issubclass(strategy, (AutoStrategy, DDPElasticStrategy))


def create_strategy(given: DDPStrategy | str, arguments: dict[str, Any]) -> DDPStrategy:
    """Return a strategy that starts the processes and averages the gradients of Lightning's loops.

    Raises:
        InvalidTypeError: for `"auto"`, an elastic strategy, or one that is not a DDP strategy.
        ConfigurationError: for options that need rankwise's own Trainer.
        RankwiseError: as the strategy's constructor.
    """
    strategy = StrategyRegistry.create(given, **arguments) if isinstance(given, str) else given
    if not isinstance(strategy, DDPStrategy) or not _can_start_ranks(type(strategy)):
        raise InvalidTypeError(
            argument="strategy",
            value=given,
            expected="a DDPStrategy of rankwise, or its name",
            remedy='RankwiseStrategy("ddp"); for restarts start the script with torchrun --max-restarts.',
        )
    if not isinstance(given, str) and arguments:
        raise ConfigurationError(
            message=f"{', '.join(arguments)} cannot be added to a strategy that exists already.",
            facts=f"strategy={given!r}.",
            remedy=f"give them to {type(given).__name__}(...) itself.",
        )
    for option, remedy in _options_of_own_loops(strategy).items():
        raise ConfigurationError(
            message=f"{option} cannot have an effect in Lightning's loops.", remedy=remedy
        )
    return strategy.with_() if strategy.is_bound else strategy


def _options_of_own_loops(strategy: DDPStrategy) -> dict[str, str]:
    """Return the given options that have no effect here, each with the remedy."""
    gradients, own = strategy.gradients, "leave it out; it needs rankwise's Trainer."
    there = "give it to Lightning: Trainer("
    finds_unused = bool(strategy.ddp_kwargs.get("find_unused_parameters"))
    default_mode = resolve_sync_mode(finds_unused_parameters=finds_unused)
    given = {
        "precision": ("precision" not in strategy.default_parts, f"{there}precision=...)."),
        "checkpoint_io": ("checkpoint_io" not in strategy.default_parts, f"{there}plugins=[...])."),
        "sync_batchnorm": (strategy.sync_batchnorm, f"{there}sync_batchnorm=True)."),
        "sync_mode": (gradients.mode is not default_mode, own),
        "gradient_weighting": (gradients.weighting is not None, own),
        "model_averaging_period": (gradients.period is not None, own),
    }
    return {name: remedy for name, (is_given, remedy) in given.items() if is_given}

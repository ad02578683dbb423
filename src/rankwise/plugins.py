"""Build a strategy from the arguments of a Trainer or Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.checks import as_list, check_is_a
from rankwise.compatibility.lightning_environments import LightningClusterEnvironment
from rankwise.environments import ClusterEnvironment
from rankwise.errors import ConfigurationError
from rankwise.precision import Precision, create_precision
from rankwise.registry import StrategyRegistry
from rankwise.strategies import Strategy
from rankwise.strategies.config import agreed_value

_DEFAULT_PARTS: Mapping[str, type] = {"precision": Precision, "checkpoint_io": TorchCheckpointIO}
_PLUGINS: Mapping[str, Any] = {
    "cluster environment": (ClusterEnvironment, LightningClusterEnvironment, str),
    "precision": Precision,
    "checkpoint IO": CheckpointIO,
    "strategy": Strategy,
}


def collect_plugins(given: Any) -> dict[str, Any]:
    """Return the content of `plugins=[...]` by kind: at most one of each, None for the others."""
    classes = (str, ClusterEnvironment, LightningClusterEnvironment, Precision, CheckpointIO, Strategy)
    expected = "a ClusterEnvironment or its name, a Precision, a CheckpointIO or a Strategy"
    plugins = as_list("plugins", given, classes, expected)
    found = {}
    for name, kind in _PLUGINS.items():
        own = [plugin for plugin in plugins if isinstance(plugin, kind)]
        if len(own) > 1:
            raise ConfigurationError(
                message=f"plugins holds {len(own)} of one kind ({name}).",
                facts=", ".join(map(repr, own)),
                remedy="keep one of them.",
            )
        found[name] = own[0] if own else None
    return found


def collect_strategy(
    strategy: Any, precision: Any, plugins: dict[str, Any], *, sync_batchnorm: bool = False
) -> Strategy:
    """Return the strategy, or one derived from it if it is bound already or gets other plug-ins."""
    check_is_a("strategy", strategy, (str, Strategy), "a name, or an instance of Strategy")
    for name, value, default in (("strategy", strategy, "auto"), ("precision", precision, None)):
        if plugins[name] is not None and value != default:
            raise ConfigurationError(
                message=f"{name}={value!r} and a {name} among the plug-ins contradict each other.",
                facts=f"plugins holds {plugins[name]!r}.",
                remedy="keep one of them.",
            )
    if precision is not None:
        check_is_a("precision", precision, (str, int), 'a name such as "32-true"')
        precision = create_precision(precision)
    strategy = plugins["strategy"] or strategy
    given: Strategy = StrategyRegistry.create(strategy) if isinstance(strategy, str) else strategy
    if precision is not None and precision.name == given.precision.name:
        precision = None  # the strategy's may have more options
    parts = {"precision": plugins["precision"] or precision, "checkpoint_io": plugins["checkpoint IO"]}
    changes: dict[str, Any] = {name: value for name, value in parts.items() if value is not None}
    for name, value in changes.items():
        own = getattr(given, name)
        is_default = name in given.default_parts and type(own) is _DEFAULT_PARTS[name]
        agreed_value(name, None if is_default else own, value)
    if sync_batchnorm:
        changes["sync_batchnorm"] = True
    return given.with_(**changes) if changes or given.is_bound else given


def agreed_placement(strategy: Strategy, **given: Any) -> dict[str, Any]:
    """Return the arguments of `bind`: those given, where the strategy's own do not contradict them."""
    own = strategy.process_config
    return {name: agreed_value(name, getattr(own, name), value) for name, value in given.items()}

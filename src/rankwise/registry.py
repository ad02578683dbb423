"""`StrategyRegistry`: strategies by name; and the strategy that a Trainer's or Fabric's arguments mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any, TypeVar, final, overload

from rankwise import strategies
from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.checks import check_is_a, check_value, checked_list
from rankwise.compatibility.lightning_environments import GivenEnvironment
from rankwise.compatibility.names import MISSING_STRATEGIES
from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownStrategyError
from rankwise.named_options import NameTable, package_of, split_options
from rankwise.precision import Precision, create_precision
from rankwise.strategies import Strategy
from rankwise.strategies.config import agreed_value

__all__ = ["RegisteredStrategy", "StrategyRegistry"]

StrategyClass = TypeVar("StrategyClass", bound=type[Strategy])
_DEFAULT_PARTS: Mapping[str, type] = {"precision": Precision, "checkpoint_io": TorchCheckpointIO}
_PLUGINS: Mapping[str, Any] = {
    "cluster environment": GivenEnvironment,
    "precision": Precision,
    "checkpoint IO": CheckpointIO,
    "strategy": Strategy,
}
_START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_forkserver": "forkserver"}
_DECORATED: Any = object()  # no class was given: `register` is used as a decorator


@final
@dataclass(frozen=True)
class RegisteredStrategy:
    """A strategy class and the arguments for its constructor."""

    strategy: type[Strategy]
    description: str
    init_params: Mapping[str, Any] = field(default_factory=dict)


@final
class _Registry(NameTable[RegisteredStrategy]):
    """Maps names, in any case, to configured strategies."""

    kind = "Strategy"
    title = "StrategyRegistry"
    argument = "strategy"
    group = "strategies"

    @overload
    def register(
        self, name: str, *, description: str = "", override: bool = False, **init_params: Any
    ) -> Callable[[StrategyClass], StrategyClass]: ...

    @overload
    def register(
        self,
        name: str,
        strategy: type[Strategy],
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> None: ...

    def register(
        self,
        name: Any,
        strategy: Any = _DECORATED,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Callable[[StrategyClass], StrategyClass] | None:
        """Register a strategy class and arguments under a name; without `strategy` this is a class decorator.

        Args:
            name: case does not matter.
            strategy: a subclass of `Strategy`.
            description: one line, for `python -m rankwise strategies`.
            override: whether to replace an entry of that name.
            init_params: for the strategy's constructor.

        Raises:
            InvalidTypeError: when the name is not a string, or the class not a `Strategy`.
            DuplicateNameError: when the name is taken.
        """
        key = self._check_name(name, override)

        def add(cls: Any) -> Any:
            is_strategy = isinstance(cls, type) and issubclass(cls, Strategy)
            check_value("strategy", cls, is_strategy, "a subclass of Strategy", error=InvalidTypeError)
            self._entries[key] = RegisteredStrategy(cls, description, init_params)
            return cls

        if strategy is _DECORATED:
            return add
        add(strategy)
        return None

    def create(self, name: str, **overrides: Any) -> Strategy:
        """Return a new strategy of that name.

        Args:
            name: it may have arguments of the constructor, which override the registered ones:
                `"ddp_spawn:find_unused_parameters=true,timeout=120"`.
            overrides: arguments of the constructor, which override both.

        Raises:
            InvalidTypeError: when the name is not a string, or an option has no value.
            UnknownStrategyError: when it is neither registered nor of an installed package.
            ConfigurationError: when it is of an installed package, and cannot be loaded.
            UnknownArgumentError: when the strategy has no such option.
        """
        plain, options = split_options("strategy", name)
        entry = self.entry(plain)
        return entry.strategy(**{**entry.init_params, **options, **overrides})

    def get(self, name: str, default: Any = None) -> Any:
        """Return a new strategy of that name, as `create`; a `default` that is not None if it is unknown."""
        try:
            return self.create(name)
        except UnknownStrategyError:
            if default is None:
                raise
            return default

    def available_strategies(self) -> list[str]:
        """Return all registered names, sorted."""
        return list(self)

    def _entries_of(self, point: EntryPoint, loaded: Any) -> Mapping[str, RegisteredStrategy]:
        entries = _aliases_of(point, loaded)
        package = f"(package {package_of(point)})"
        return {
            name: replace(entry, description=f"{entry.description} {package}".lstrip())
            for name, entry in entries.items()
        }

    def _unknown(self, name: str) -> UnknownStrategyError:
        other = MISSING_STRATEGIES.get(name.lower().partition("_stage")[0], "")
        return UnknownStrategyError(name=name, known=tuple(self), remedy=other)


def _aliases_of(point: EntryPoint, loaded: Any) -> Mapping[str, RegisteredStrategy]:
    """Return the strategies of an entry point: a class and its own names, or what a function returns."""
    if isinstance(loaded, type) and issubclass(loaded, Strategy):
        names = {point.name: ("", {}), **vars(loaded).get("registered_names", {})}
        return {alias: RegisteredStrategy(loaded, *rest) for alias, rest in names.items()}
    aliases = loaded() if callable(loaded) and not isinstance(loaded, type) else None
    if isinstance(aliases, Mapping) and all(
        isinstance(alias, str) and isinstance(entry, RegisteredStrategy) for alias, entry in aliases.items()
    ):
        return aliases
    expected = (
        "a subclass of Strategy, or a function without arguments that returns {name: RegisteredStrategy(...)}"
    )
    raise InvalidTypeError(argument=point.value, value=loaded, expected=expected)


StrategyRegistry = _Registry()
for _strategy in strategies.__all__:  # every class of it is registered
    getattr(strategies, _strategy).register_strategies(StrategyRegistry)


def bound_strategy(
    strategy: Any, precision: Any, plugins: Any, *, sync_batchnorm: bool = False, **placement: Any
) -> Strategy:
    """Build and bind the strategy of a Trainer's or Fabric's arguments, which must not contradict its own.

    A copy of an instance is bound if it is bound already or gets other plug-ins. `placement` is for `bind`.
    """
    found = _by_kind(plugins)
    given = _with_plugins(strategy, precision, found, sync_batchnorm=sync_batchnorm)
    own, placement["cluster_environment"] = given.process_config, found["cluster environment"]
    agreed = {name: agreed_value(name, getattr(own, name), value) for name, value in placement.items()}
    given.bind(environment=agreed.pop("cluster_environment"), **agreed)
    return given


def _by_kind(given: Any) -> dict[str, Any]:
    """Return the content of `plugins=[...]` by kind: at most one of each, None for the others."""
    expected = "a ClusterEnvironment or its name, a Precision, a CheckpointIO or a Strategy"
    plugins = checked_list("plugins", given, tuple(_PLUGINS.values()), expected)
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


def _remedy_for_two(given: object, plugin: object) -> str:
    """Return what to write instead of an argument and a plug-in: a name may stand for a start method."""
    start_method = _START_METHODS.get(str(given).lower())
    if start_method is None or not isinstance(plugin, Strategy):
        return "keep one of them."
    return f"keep the plug-in, as {type(plugin).__name__}(start_method={start_method!r})."


def _with_plugins(
    strategy: Any, precision: Any, plugins: dict[str, Any], *, sync_batchnorm: bool
) -> Strategy:
    """Return the strategy, or one derived from it if it is bound already or gets other plug-ins."""
    check_is_a("strategy", strategy, (str, Strategy), "a name, or an instance of Strategy")
    for name, value, default in (("strategy", strategy, "auto"), ("precision", precision, None)):
        if plugins[name] is not None and value != default:
            raise ConfigurationError(
                message=f"{name}={value!r} and a {name} among the plug-ins contradict each other.",
                facts=f"plugins holds {plugins[name]!r}.",
                remedy=_remedy_for_two(value, plugins[name]),
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

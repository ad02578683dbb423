"""The table of strategy names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar, final, overload

from rankwise.compatibility.names import MISSING_STRATEGIES
from rankwise.errors import InvalidTypeError, UnknownStrategyError
from rankwise.named_options import NameTable, split_options
from rankwise.strategies import (
    AutoStrategy,
    DDPElasticStrategy,
    DDPForkStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)

__all__ = ["RegisteredStrategy", "StrategyRegistry"]

StrategyClass = TypeVar("StrategyClass", bound=type[Strategy])
_ENTRY_POINTS = "rankwise.strategies"
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

        def add(cls: StrategyClass) -> StrategyClass:
            self._entries[key] = RegisteredStrategy(_check_class(cls), description, init_params)
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
            UnknownStrategyError: when it is neither registered nor an installed entry point.
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

    def _find_unregistered(self, name: str) -> RegisteredStrategy:
        for point in entry_points(group=_ENTRY_POINTS, name=name):
            return RegisteredStrategy(_check_class(point.load()), f"from {point.value}")
        other = MISSING_STRATEGIES.get(name.lower().partition("_stage")[0], "")
        raise UnknownStrategyError(name=name, known=tuple(self), remedy=other)


def _check_class(strategy: Any) -> type[Strategy]:
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return strategy
    raise InvalidTypeError(argument="strategy", value=strategy, expected="a subclass of Strategy")


StrategyRegistry = _Registry()
for _strategy in (
    AutoStrategy,
    SingleDeviceStrategy,
    DDPStrategy,
    DDPSpawnStrategy,
    DDPForkStrategy,
    DDPElasticStrategy,
):
    _strategy.register_strategies(StrategyRegistry)

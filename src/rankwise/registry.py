"""The table of strategy names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar, final, overload

from rankwise.errors import DuplicateNameError, InvalidTypeError, UnknownStrategyError
from rankwise.named_options import split_options
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
# Names that Lightning has, or had, and what comes near.
_PER_DEVICE = 'Trainer(strategy="ddp"): a process for each device, instead of threads in one.'
_WHOLE_MODEL = (
    'Trainer(strategy="ddp") keeps the whole model on each device; torch\'s ZeroRedundancyOptimizer, from '
    "configure_optimizers, shards the optimizer's state."
)
_ELSEWHERE = {
    "dp": _PER_DEVICE,
    "ddp2": _PER_DEVICE,
    "ddp_cpu": 'Trainer(strategy="ddp", accelerator="cpu", devices=...).',
    "horovod": 'Trainer(strategy="ddp"), started by mpirun or torchrun if you like.',
    "fsdp": _WHOLE_MODEL,
    "fsdp2": _WHOLE_MODEL,
    "fsdp_native": _WHOLE_MODEL,
    "deepspeed": _WHOLE_MODEL,
    "ddp_sharded": _WHOLE_MODEL,
    "ddp_sharded_spawn": _WHOLE_MODEL,
    "single_tpu": 'Trainer(strategy="auto"): rankwise trains on CPUs and CUDA devices.',
    "tpu_spawn": 'Trainer(strategy="auto"): rankwise trains on CPUs and CUDA devices.',
    "xla": 'Trainer(strategy="auto"): rankwise trains on CPUs and CUDA devices.',
}
_DECORATED: Any = object()  # no class was given: the one that is decorated is meant


@final
@dataclass(frozen=True)
class RegisteredStrategy:
    """What a name stands for: a class, and what its constructor is given."""

    strategy: type[Strategy]
    description: str
    init_params: Mapping[str, Any] = field(default_factory=dict)


@final
class _Registry:
    """Names, in any case, and the configured strategies that they stand for."""

    def __init__(self) -> None:
        self._entries: dict[str, RegisteredStrategy] = {}

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
        """Give a configured strategy a name; without `strategy` this is a class decorator.

        Args:
            name: case does not matter.
            strategy: a subclass of `Strategy`.
            description: one line, for `python -m rankwise strategies`.
            override: whether the name may be taken already.
            init_params: for the strategy's constructor.

        Raises:
            InvalidTypeError: when the name is no string, or the class no `Strategy`.
            DuplicateNameError: when the name is taken.
        """
        if not isinstance(name, str) or not name or ":" in name:
            raise InvalidTypeError(
                argument="name", value=name, expected='a string that is not empty; options follow a ":"'
            )
        if name.lower() in self._entries and not override:
            raise DuplicateNameError(name=name.lower())
        if strategy is _DECORATED:
            return self._decorator(name, description, override, init_params)
        self._entries[name.lower()] = RegisteredStrategy(_check_class(strategy), description, init_params)
        return None

    def create(self, name: str, **overrides: Any) -> Strategy:
        """Return a new strategy of that name.

        Args:
            name: it may carry arguments of the constructor, which beat what was registered:
                `"ddp_spawn:find_unused_parameters=true,timeout=120"`.
            overrides: arguments of the constructor, which beat both.

        Raises:
            InvalidTypeError: when the name is no string, or an option has no value.
            UnknownStrategyError: when it is not registered, nor an installed entry point.
            UnknownArgumentError: when the strategy has no such option.
        """
        if not isinstance(name, str):
            raise InvalidTypeError(argument="strategy", value=name, expected="a name")
        plain, options = split_options("strategy", name)
        entry = self._find(plain)
        return entry.strategy(**{**entry.init_params, **options, **overrides})

    def remove(self, name: str) -> None:
        """Forget a name.

        Raises:
            UnknownStrategyError: when it is not registered.
        """
        self._find(name)
        self._entries.pop(name.lower(), None)

    def describe(self, name: str) -> str:
        """Return the description of a name.

        Raises:
            UnknownStrategyError: when it is not registered.
        """
        return self._find(name).description

    def entry(self, name: str) -> RegisteredStrategy:
        """Return what a name stands for.

        Raises:
            UnknownStrategyError: when it is not registered.
        """
        return self._find(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __repr__(self) -> str:
        return f"StrategyRegistry({', '.join(self)})"

    def _find(self, name: str) -> RegisteredStrategy:
        if not isinstance(name, str):
            raise InvalidTypeError(argument="strategy", value=name, expected="a name")
        if name.lower() in self._entries:
            return self._entries[name.lower()]
        for point in entry_points(group=_ENTRY_POINTS, name=name):
            return RegisteredStrategy(_check_class(point.load()), f"from {point.value}")
        raise UnknownStrategyError(
            name=name, known=tuple(self), remedy=_ELSEWHERE.get(name.lower().partition("_stage")[0], "")
        )

    def _decorator(
        self, name: str, description: str, override: bool, init_params: Mapping[str, Any]
    ) -> Callable[[StrategyClass], StrategyClass]:
        def decorate(cls: StrategyClass) -> StrategyClass:
            self.register(name, _check_class(cls), description, override, **init_params)
            return cls

        return decorate


def _check_class(strategy: Any) -> type[Strategy]:
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return strategy
    raise InvalidTypeError(argument="strategy", value=strategy, expected="a subclass of Strategy")


def _register_built_in(registry: _Registry) -> None:
    registry.register("auto", AutoStrategy, "one process where one is enough, DDP otherwise")
    registry.register("single_device", SingleDeviceStrategy, "one process, one device")
    kinds: tuple[tuple[str, type[Strategy], str, dict[str, Any]], ...] = (
        ("ddp", DDPStrategy, "DDP; the script is run again for each rank", {}),
        ("ddp_spawn", DDPSpawnStrategy, "DDP; processes are spawned", {}),
        ("ddp_fork", DDPForkStrategy, "DDP; processes are forked", {}),
        ("ddp_notebook", DDPForkStrategy, "DDP; processes are forked, works in notebooks", {}),
        (
            "ddp_forkserver",
            DDPStrategy,
            "DDP; processes are forked by a warm server",
            {"start_method": "forkserver"},
        ),
        ("ddp_elastic", DDPElasticStrategy, "DDP; torch's elastic agent restarts processes that fail", {}),
    )
    for name, cls, description, params in kinds:
        registry.register(name, cls, description, **params)
        for value in (True, False):
            alias = f"{name}_find_unused_parameters_{str(value).lower()}"
            more = {**params, "find_unused_parameters": value}
            registry.register(alias, cls, f"{description}; find_unused_parameters={value}", **more)


StrategyRegistry = _Registry()
_register_built_in(StrategyRegistry)

"""The table of names: what can be registered, found, replaced, removed; and what is refused."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import ClassVar

import pytest

from rankwise.errors import DuplicateNameError, InvalidTypeError, UnknownArgumentError, UnknownStrategyError
from rankwise.gradient_sync import CommHookRegistry
from rankwise.registry import StrategyRegistry
from rankwise.strategies import (
    AutoStrategy,
    DDPForkStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
)
from rankwise.strategies.config import RegisteredNames
from tests.helpers.raising import raises


class Own(DDPStrategy):
    """A user's own strategy."""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = set(StrategyRegistry)
    yield
    for name in set(StrategyRegistry) - before:
        StrategyRegistry.remove(name)


KINDS = ("ddp", "ddp_spawn", "ddp_fork", "ddp_forkserver", "ddp_notebook", "ddp_elastic")


def test_all_names_are_there() -> None:
    """The names of the documentation, with their aliases, in order, also in the repr; each is described."""
    aliases = [f"{kind}_find_unused_parameters_{value}" for kind in KINDS for value in ("true", "false")]
    assert set(StrategyRegistry) == {"auto", "single_device", *KINDS, *aliases}
    assert len(StrategyRegistry) == 20
    assert type(StrategyRegistry.create("single_device")) is SingleDeviceStrategy
    assert type(StrategyRegistry.create("auto")) is AutoStrategy
    assert list(StrategyRegistry) == sorted(StrategyRegistry)
    assert repr(StrategyRegistry).startswith("StrategyRegistry(auto, ddp, ")
    assert all(StrategyRegistry.describe(name) for name in StrategyRegistry)


def test_a_name_carries_options() -> None:
    """They are arguments of the constructor, beat what was registered, and are beaten by keywords."""
    name = "DDP_Spawn_find_unused_parameters_true: find_unused_parameters=false, timeout=120,rendezvous=tcp"
    strategy = StrategyRegistry.create(name, rendezvous="private")
    assert type(strategy) is DDPSpawnStrategy
    assert strategy.ddp_kwargs["find_unused_parameters"] is False
    assert strategy.timeout == timedelta(minutes=2)
    assert strategy.rendezvous == "private"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("ddp:timeout", InvalidTypeError, "name:option=value"),
        ("ddp:=3", InvalidTypeError, "name:option=value"),
        ("ddp:timout=3", UnknownArgumentError, "Did you mean 'timeout'"),
        ("ddp:timeout=soon", InvalidTypeError, "timeout"),
        ("dpp:timeout=3", UnknownStrategyError, "Did you mean 'ddp'"),
    ],
)
def test_options_that_cannot_be(name: str, error: type[Exception], text: str) -> None:
    """They are refused like keywords, and the name is looked up without them."""
    raises(error, re.escape(text), StrategyRegistry.create, name)


@pytest.mark.parametrize(
    ("name", "cls", "start_method"),
    [
        ("ddp", DDPStrategy, "popen"),
        ("ddp_spawn", DDPSpawnStrategy, "spawn"),
        ("ddp_fork", DDPForkStrategy, "fork"),
        ("ddp_notebook", DDPForkStrategy, "fork"),
        ("ddp_forkserver", DDPStrategy, "forkserver"),
    ],
)
def test_names_are_configured_classes(name: str, cls: type[DDPStrategy], start_method: str) -> None:
    """Each name gives its class with its start method, in any case; every call a new instance."""
    strategy = StrategyRegistry.create(name)
    assert type(strategy) is cls
    assert strategy.start_method == start_method
    assert StrategyRegistry.create(name) is not strategy
    for other in (name.upper(), name.title()):
        assert other in StrategyRegistry
        assert type(StrategyRegistry.create(other)) is cls


def test_overrides_beat_what_was_registered() -> None:
    """Keywords to `create` win over the registered ones, which stay; a removed name is gone."""
    StrategyRegistry.register("own", Own, start_method="fork", grace_period_s=3.0)
    strategy = StrategyRegistry.create("own", grace_period_s=5.0)
    assert isinstance(strategy, Own)
    assert (strategy.start_method, strategy.grace_period_s) == ("fork", 5.0)
    again = StrategyRegistry.create("own")
    assert isinstance(again, Own)
    assert again.grace_period_s == 3.0
    StrategyRegistry.remove("OWN")
    assert "own" not in StrategyRegistry
    raises(UnknownStrategyError, None, StrategyRegistry.remove, "own")


def test_a_decorator_registers() -> None:
    """Without a class `register` decorates one, and gives it back."""

    @StrategyRegistry.register("decorated", description="one line", start_method="fork")
    class Decorated(DDPStrategy):
        pass

    assert isinstance(Decorated, type)
    assert type(StrategyRegistry.create("Decorated")) is Decorated
    assert StrategyRegistry.describe("decorated") == "one line"


def test_a_duplicate_is_refused() -> None:
    """A taken name is refused in any case, by a decorator before it has a class, unless it is replaced."""
    expected = "(?s)'ddp' is registered already.*override=True"
    raises(DuplicateNameError, expected, StrategyRegistry.register, "DDP", Own)
    assert type(StrategyRegistry.create("ddp")) is DDPStrategy
    raises(DuplicateNameError, None, StrategyRegistry.register, "ddp")
    StrategyRegistry.register("own", Own)
    StrategyRegistry.register("own", SingleDeviceStrategy, override=True)
    assert type(StrategyRegistry.create("own")) is SingleDeviceStrategy


def test_what_is_no_strategy_class_is_refused() -> None:
    """Anything but a subclass of `Strategy`, also what is decorated; None does not pass for a decorator."""
    for wrong in (int, object, DDPStrategy(), "ddp", 3, None):
        with pytest.raises(InvalidTypeError, match="subclass of Strategy"):
            StrategyRegistry.register("wrong", wrong)  # type: ignore[arg-type]  # wrong on purpose
    decorate = StrategyRegistry.register("wrong")
    assert decorate is not None
    with pytest.raises(InvalidTypeError):
        decorate(int)  # type: ignore[type-var]  # wrong on purpose
    assert "wrong" not in StrategyRegistry


@pytest.mark.parametrize("name", [None, 3, "", b"ddp", ["ddp"], ("ddp",)], ids=repr)
def test_a_name_is_a_string(name: object) -> None:
    """What is none is refused, for registering and for creating; `in` takes anything."""
    with pytest.raises((InvalidTypeError, UnknownStrategyError)):
        StrategyRegistry.register(name, Own)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises((InvalidTypeError, UnknownStrategyError)):
        StrategyRegistry.create(name)  # type: ignore[arg-type]  # wrong on purpose
    assert name not in StrategyRegistry


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("dpp", "ddp"), ("ddp_spwan", "ddp_spawn"), ("DDP_FROK", "ddp_fork"), ("sigle_device", "single_device")],
)
def test_a_typo_is_answered(typo: str, meant: str) -> None:
    """An unknown name is a KeyError and a ValueError that suggests the nearest and lists all."""
    with pytest.raises(UnknownStrategyError, match=f"Did you mean '{meant}'") as caught:
        StrategyRegistry.create(typo)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ValueError)
    assert "'ddp_notebook'" in str(caught.value)
    for name in ("fsdp", "deepspeed_stage_2"):  # these shard the model: nothing that looks alike is suggested
        with pytest.raises(UnknownStrategyError, match="out of the scope of rankwise") as caught:
            StrategyRegistry.create(name)
        assert "Did you mean" not in str(caught.value)


def test_lightnings_ways_to_look_up() -> None:
    """`get` makes a strategy or returns the default; `[...]` is the entry; the names are a list."""
    strategy = StrategyRegistry.get("DDP_spawn")
    assert type(strategy) is DDPSpawnStrategy
    assert StrategyRegistry.get("ddp_spwan", strategy) is strategy
    raises(UnknownStrategyError, None, StrategyRegistry.get, "ddp_spwan")
    with pytest.raises(UnknownArgumentError):
        StrategyRegistry.get("ddp:timout=3", strategy)  # the name is known
    assert StrategyRegistry["ddp_fork"].strategy is DDPForkStrategy
    assert StrategyRegistry["ddp_forkserver"].init_params == {"start_method": "forkserver"}
    with pytest.raises(KeyError):
        StrategyRegistry["ddp_spwan"]
    assert StrategyRegistry.available_strategies() == list(StrategyRegistry)
    assert CommHookRegistry["fp16_compress"] is CommHookRegistry.entry("fp16_compress")


class Named(DDPForkStrategy):
    """Has a name of its own."""

    registered_names: ClassVar[RegisteredNames] = {"named": ("mine", {"timeout": 5})}


def test_a_subclass_registers_its_names() -> None:
    """Each class registers its names, a subclass those that it declares, or those of its base."""
    registry = type(StrategyRegistry)()
    for cls in {entry.strategy for entry in map(StrategyRegistry.entry, StrategyRegistry)}:
        cls.register_strategies(registry)
    found, expected = ({name: each[name] for name in each} for each in (registry, StrategyRegistry))
    assert found == expected
    Named.register_strategies(StrategyRegistry)
    assert type(StrategyRegistry.create("named")) is Named
    assert StrategyRegistry.describe("named") == "mine"
    raises(DuplicateNameError, "'ddp' is registered", Own.register_strategies, StrategyRegistry)

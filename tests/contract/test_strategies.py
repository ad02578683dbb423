"""Every registered strategy keeps the same contract, on two ranks (`single_device`: on one)."""

import json
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from rankwise import Trainer
from rankwise.errors import (
    InvalidTypeError,
    LifecycleError,
    UnknownArgumentError,
    UnknownNameError,
    WorkerRaisedError,
)
from rankwise.precision import MixedPrecision
from rankwise.registry import StrategyRegistry
from rankwise.strategies import AutoStrategy, DDPStrategy, SingleDeviceStrategy, Strategy
from rankwise.testing import check_strategy
from tests.contract.lives import fit_with_two_trainers
from tests.helpers.raising import raises
from tests.helpers.scripts import ScriptRunner
from tests.helpers.shared import SharedValues
from tests.process.helpers import with_tests

NAMES = tuple(StrategyRegistry)
RERUN = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")

# All strategies that re-run the script, in one script: each of its jobs uses the same two processes.
SCRIPT = """
    import json, sys
    from rankwise.registry import StrategyRegistry
    from rankwise.testing import check_strategy
    from tests.contract.lives import fit_with_two_trainers

    lives = {}
    for name in sys.argv[1:]:
        strategy = StrategyRegistry.create(name, accelerator="cpu", devices=2)
        check_strategy(strategy, timeout=40)
        lives[name] = fit_with_two_trainers(strategy, 2)
    if strategy.with_().bind().global_rank == 0:
        print(json.dumps(lives))
"""

Life = list[tuple[int, list[float]]]


def _size(name: str) -> int:
    return 1 if name == "single_device" else 2


def _created(name: str, **options: Any) -> Strategy:
    return StrategyRegistry.create(name, accelerator="cpu", devices=_size(name), **options)


@pytest.fixture(scope="module")
def rerun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Life]]:
    """Return a function that checks the strategies of scripts, once, and returns what two Trainers gave."""
    shared: SharedValues[dict[str, Life]] = SharedValues()

    def run() -> dict[str, Life]:
        run_script = ScriptRunner(tmp_path_factory.mktemp("contract"))
        result = run_script(SCRIPT, *RERUN, env=with_tests(), siblings=1)
        assert result.returncode == 0, result
        lives: dict[str, Life] = json.loads(result.stdout)
        return lives

    return lambda: shared.get(RERUN, run)


# Ranks that are no forks import torch, which takes seconds. An alias differs in one argument only.
ALIASES = [name for name in NAMES if "_find_unused_parameters_" in name]
TIERS = dict.fromkeys((*ALIASES, "ddp_spawn", "ddp_elastic"), pytest.mark.soak)
TIERS |= dict.fromkeys(("ddp", "ddp_forkserver", "ddp_fork_find_unused_parameters_true"), pytest.mark.full)
LAUNCHED = [pytest.param(name, marks=TIERS.get(name, ())) for name in NAMES]


@pytest.mark.parametrize("name", LAUNCHED)
def test_contract(name: str, rerun: Callable[[], dict[str, Life]]) -> None:
    """The strategy keeps the rules that other people's strategies are checked for."""
    if name in RERUN:
        assert name in rerun()
    else:
        check_strategy(_created(name))


# ---------------------------------------------------------------------- a strategy's life

every_name = pytest.mark.parametrize("each", NAMES)


@every_name
def test_binding(each: str) -> None:
    """A new strategy has no ranks; it is bound once, and has a placement then, but no job."""
    strategy = _created(each)
    assert (strategy.is_bound, strategy.results) == (False, {})
    assert _created(each) is not strategy
    raises(LifecycleError, "configured", strategy.barrier)
    assert strategy.bind() == strategy.ranks == strategy.placement.ranks
    assert strategy.world_size == _size(each)
    assert strategy.root_device == torch.device("cpu")
    raises(LifecycleError, r"bind\(\) was called in state 'bound'", strategy.bind)
    with pytest.raises(LifecycleError, match="in a job"):
        strategy.job  # noqa: B018 -- the property raises


@every_name
def test_deriving(each: str) -> None:
    """`with_` gives another strategy, not bound, with what was changed; the first one stays as it is."""
    strategy = _created(each)
    strategy.bind()
    before = dict(vars(strategy))
    precision = MixedPrecision("bf16-mixed")
    derived = strategy.with_(precision=precision, timeout=7, devices=1)
    assert type(derived) is type(strategy)
    assert (derived.is_bound, derived.precision, derived.timeout) == (False, precision, timedelta(seconds=7))
    assert derived.bind().world_size == 1
    assert vars(strategy) == before
    raises(UnknownArgumentError, "Did you mean 'timeout'", strategy.with_, timeut=7)
    raises(InvalidTypeError, "precision", strategy.with_, precision=MixedPrecision)


@every_name
def test_pickling(each: str) -> None:
    """A pickle has everything but the launcher and the job: the same arguments, bound or not."""
    strategy = _created(each, gradient_weighting="samples")
    copy = pickle.loads(pickle.dumps(strategy))
    assert not copy.is_bound
    assert (copy.process_config, copy.group_config) == (strategy.process_config, strategy.group_config)
    ranks = strategy.bind()
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.ranks, copy.root_device, copy.gradient_weighting) == (ranks, torch.device("cpu"), "samples")
    with pytest.raises(LifecycleError):
        copy.launcher  # noqa: B018 -- the property raises


@every_name
def test_attributes_that_are_arguments_can_be_set(each: str) -> None:
    """The attributes of a strategy with the names of its arguments can be set until it is bound."""
    strategy: Any = _created(each)
    strategy.sync_batchnorm = False
    strategy.timeout = 7
    assert strategy.timeout == timedelta(seconds=7)
    if isinstance(strategy, DDPStrategy):
        strategy.init_timeout = strategy.stall_warning = timedelta(seconds=9)
        strategy.start_method, strategy.rendezvous = "spawn", "tcp"
        strategy.check_collectives, strategy.grace_period_s = True, 2.0
        with pytest.raises(UnknownNameError):
            strategy.start_method = "thread"
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.process_config, copy.group_config) == (strategy.process_config, strategy.group_config)


def test_results_are_not_pickled() -> None:
    """After a launch a strategy can be pickled, whatever the ranks returned; before it has no job to end."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.teardown()
    assert not strategy.is_bound
    strategy.launch(lambda _: lambda: None)
    assert strategy.results
    assert pickle.loads(pickle.dumps(strategy)).results == {}


def test_saving_uses_the_broadcast_of_a_subclass(tmp_path: Path) -> None:
    """`save_checkpoint` tells other ranks of an error by `broadcast`, which a subclass may override."""
    calls: list[Any] = []

    class Broadcasting(DDPStrategy):
        def broadcast(self, obj: Any, src: int = 0) -> Any:
            calls.append((obj, src))
            return obj

    strategy = Broadcasting(accelerator="cpu", devices=1)
    strategy.bind()
    strategy.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    assert calls == [(None, 0)]


def test_auto_shows_the_start_method_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` forks where the script cannot be run again, and says so in `start_method`."""
    monkeypatch.setattr("rankwise.strategies.ddp.can_rerun", lambda: False)
    strategy = AutoStrategy(accelerator="cpu", devices=2)
    before = strategy.process_config
    strategy.bind()
    assert strategy.start_method == "fork"
    assert strategy.process_config == before
    assert strategy.with_().start_method == "popen"


@pytest.mark.parametrize("each", LAUNCHED)
def test_one_strategy_for_two_trainers(each: str, rerun: Callable[[], dict[str, Life]]) -> None:
    """Two Trainers fit with one instance, one after the other, to the weights of one process."""
    life = rerun()[each] if each in RERUN else fit_with_two_trainers(_created(each), _size(each))
    single = fit_with_two_trainers(SingleDeviceStrategy(), 1)
    for (world_size, weights), (_, expected) in zip(life, single, strict=True):
        assert world_size == _size(each)
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_given_strategy_keeps_its_plugins() -> None:
    """A Trainer with plug-ins of its own uses a copy of the strategy that it is given."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    before = dict(vars(strategy))
    trainer = Trainer(strategy=strategy, precision="bf16-mixed", logger=False, enable_checkpointing=False)
    assert trainer.strategy.precision.name == "bf16-mixed"
    assert vars(strategy) == before


# ---------------------------------------------------------------------- the aliases differ


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_differs_in_one_argument(alias: str) -> None:
    """`<name>_find_unused_parameters_<value>` is the class of `<name>`, with that argument for DDP only."""
    name, _, value = alias.partition("_find_unused_parameters_")
    base, entry = StrategyRegistry.entry(name), StrategyRegistry.entry(alias)
    assert entry.strategy is base.strategy
    assert entry.init_params == {**base.init_params, "find_unused_parameters": value == "true"}
    strategies = [cast(DDPStrategy, StrategyRegistry.create(each)) for each in (name, alias)]
    plain, other = (
        {**vars(each), "gradients": vars(each.gradients), "precision": None, "checkpoint_io": None}
        for each in strategies
    )
    differing = {key for key in plain if plain[key] != other[key]}
    assert differing == ({"ddp_kwargs", "gradients"} if value == "true" else set())


class HalfUsed(nn.Linear):
    """Has another layer that it does not use."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.unused = nn.Linear(2, 2)


def train_half(strategy: Strategy) -> bool:
    wrapped = strategy.setup_module(HalfUsed())
    for _ in range(2):
        wrapped(torch.ones(1, 2)).sum().backward()
    unused = cast(HalfUsed, strategy.unwrap_module(wrapped)).unused
    return unused.weight.grad is None or not bool(unused.weight.grad.any())


@pytest.mark.parametrize("name", ["ddp_fork", *(each for each in ALIASES if each.startswith("ddp_fork_"))])
def test_unused_parameters_are_an_error_otherwise(name: str) -> None:
    """`..._find_unused_parameters_true` allows them; without it the second step raises DDP's own error."""
    strategy = StrategyRegistry.create(name, accelerator="cpu", devices=2)
    if name.endswith("_true"):
        assert strategy.launch(train_half) is True
    else:
        raises(WorkerRaisedError, "find_unused_parameters", strategy.launch, train_half)


@pytest.mark.distributed
def test_a_sharded_optimizer_is_consolidated(rank_strategy: DDPStrategy) -> None:
    """Rank 0's state of a `ZeroRedundancyOptimizer` is whole; the others' is empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = rank_strategy.setup_module(nn.Linear(3, 3))
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.1)
    wrapped(torch.ones(1, 3)).sum().backward()
    rank_strategy.optimizer_step(optimizer)
    state = rank_strategy.get_optimizer_state(optimizer)
    if rank_strategy.is_global_zero:
        assert len(state["state"]) == 2
    else:
        assert state == {}


def closure_value(strategy: Strategy) -> tuple[float, float]:
    model = strategy.setup_module(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    inner = strategy.unwrap_module(model)
    before = next(inner.parameters()).item()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 1)).sum()
        strategy.backward(loss)
        return loss

    value = strategy.optimizer_step(optimizer, closure)
    return value.item() - before, next(inner.parameters()).item() - before


@pytest.mark.parametrize(("name", "size"), [("single_device", 1), ("ddp_fork", 2)])
def test_an_optimizers_closure_is_called(name: str, size: int) -> None:
    """`optimizer_step` with a closure returns its loss, and steps by its gradient."""
    loss, change = StrategyRegistry.create(name, accelerator="cpu", devices=size).launch(closure_value)
    assert loss == 0.0
    assert change == pytest.approx(-1.0)


@pytest.mark.full
def test_a_partial_function_is_launched() -> None:
    """Any callable that can be pickled can be launched."""
    strategy = StrategyRegistry.create("ddp_forkserver", accelerator="cpu", devices=2)
    assert strategy.launch(partial(closure_value))[1] == pytest.approx(-1.0)

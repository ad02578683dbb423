"""Every registered strategy keeps the same contract, on two ranks (`single_device`: on one)."""

import pickle
import warnings
from collections.abc import Sequence
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
from tests.contract.lives import fit_with_two_trainers, life_of
from tests.contract.rules import Facts, facts_of, trained_alone
from tests.helpers.scripts import ScriptRunner
from tests.helpers.shared import SharedValues
from tests.process.helpers import with_tests

NAMES = tuple(StrategyRegistry)
RERUN = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")

# All strategies that re-run the script, in one script: each of its jobs uses the same two processes.
SCRIPT = """
    import sys
    import torch
    from rankwise.registry import StrategyRegistry
    from tests.contract.lives import life_of
    from tests.contract.rules import facts_of

    facts, lives = {}, {}
    for name in sys.argv[2:]:
        strategy = StrategyRegistry.create(name, accelerator="cpu", devices=2)
        strategy.launch(facts_of, sys.argv[1])
        facts[name] = strategy.results
        lives[name] = life_of(name, 2)
    if strategy.is_global_zero:
        torch.save((facts, lives), f"{sys.argv[1]}/results.pt")
"""

Life = tuple[list[list[Any]], list[Any]]


class _Results:
    """The facts and the lives of every strategy, collected when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scripts: SharedValues[tuple[dict[str, dict[int, Facts]], dict[str, Life]]] = SharedValues()
        self._facts: SharedValues[dict[int, Facts]] = SharedValues()
        self._lives: SharedValues[Life] = SharedValues()

    def facts_of(self, name: str) -> dict[int, Facts]:
        """Return what each rank has found out."""
        if name in RERUN:
            return self._scripts.get(RERUN, self._rerun)[0][name]
        return self._facts.get(name, lambda: self._launch(name))

    def life_of(self, name: str) -> Life:
        """Return the results of two launches and of two Trainers with one strategy."""
        if name in RERUN:
            return self._scripts.get(RERUN, self._rerun)[1][name]
        return self._lives.get(name, lambda: life_of(name, _size(name)))

    def _rerun(self) -> tuple[dict[str, dict[int, Facts]], dict[str, Life]]:
        result = ScriptRunner(self._folder)(SCRIPT, str(self._folder), *RERUN, env=with_tests(), siblings=1)
        assert result.returncode == 0, result
        found: tuple[Any, Any] = torch.load(self._folder / "results.pt", weights_only=False)
        return found

    def _launch(self, name: str) -> dict[int, Facts]:
        strategy = StrategyRegistry.create(name, accelerator="cpu", devices=_size(name))
        strategy.launch(facts_of, str(self._folder))
        return cast(dict[int, Facts], strategy.results)


def _size(name: str) -> int:
    return 1 if name == "single_device" else 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> _Results:
    return _Results(tmp_path_factory.mktemp("contract"))


# Ranks that are no forks import torch, which takes seconds; the last ones differ as others do.
NEW_INTERPRETERS = (*RERUN, "ddp_spawn", "ddp_elastic")
SLOW = tuple(
    f"{name}_find_unused_parameters_{value}"
    for name in ("ddp_spawn", "ddp_elastic")
    for value in ("false", "true")
)


def _in_tiers(*, soak: Sequence[str]) -> list[Any]:
    """Return all names as parameters, each in its tier."""
    marks = dict.fromkeys(NEW_INTERPRETERS, pytest.mark.full) | dict.fromkeys(soak, pytest.mark.soak)
    return [pytest.param(name, marks=marks.get(name, ())) for name in NAMES]


LAUNCHED = _in_tiers(soak=SLOW)
LAUNCHED_TWICE = _in_tiers(soak=(*SLOW, "ddp_spawn", "ddp_elastic"))


@pytest.fixture(scope="module", params=LAUNCHED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def size(name: str) -> int:
    return _size(name)


@pytest.fixture
def ranks(name: str, size: int, results: _Results) -> list[Facts]:
    """Return each rank's facts, in rank order."""
    found = results.facts_of(name)
    assert sorted(found) == list(range(size))
    return [found[rank] for rank in range(size)]


@pytest.fixture
def total(size: int) -> float:
    """The sum of rank + 1 over the ranks."""
    return float(sum(range(1, size + 1)))


def test_places(ranks: list[Facts], size: int) -> None:
    """Ranks and world size are right, and the sampler's arguments follow them."""
    for rank, facts in enumerate(ranks):
        assert (facts["ranks"].global_rank, facts["ranks"].local_rank, facts["ranks"].world_size) == (
            rank,
            rank,
            size,
        )
        assert facts["is_global_zero"] is (rank == 0)
        assert facts["sampler"] == {"num_replicas": size, "rank": rank}


def test_reductions(ranks: list[Facts], size: int, total: float) -> None:
    """Each operation of `all_reduce`, by its name in any case, on every rank."""
    mean = [total / size, 2.0]
    expected = {
        "sum": [total, 2.0 * size],
        "SUM": [total, 2.0 * size],
        "mean": mean,
        "avg": mean,
        "min": [1.0, 2.0],
        "max": [float(size), 2.0],
        "product": [float(size), 2.0**size],  # 1 * 2, 2 * 2
    }
    for facts in ranks:
        assert facts["reduced"] == expected
        assert facts["reduced_default"] == mean


def test_reductions_leave_their_input(ranks: list[Facts]) -> None:
    """The input tensor is not changed."""
    assert [facts["input_after"] for facts in ranks] == [[rank + 1.0, 2.0] for rank in range(len(ranks))]


def test_the_mean_of_integers_is_a_fraction(ranks: list[Facts], size: int, total: float) -> None:
    """The mean of whole numbers is not rounded; their sum stays whole."""
    for facts in ranks:
        assert facts["integers"] == [(size - 1) / 2, 3.0]
        assert facts["integer_sum"] == int(total)
        assert facts["integer_sum"].dtype == torch.int64


def test_reduced_precision_is_kept(ranks: list[Facts]) -> None:
    """A bfloat16 tensor gives a bfloat16 result."""
    for facts in ranks:
        assert facts["half"].dtype == torch.bfloat16
        assert facts["half"].tolist() == [0.5, 1.5]


def test_what_is_no_tensor_comes_back(ranks: list[Facts]) -> None:
    """`all_reduce` returns any other value unchanged."""
    assert all(facts["non_tensors"] == [3, "text", None, [1]] for facts in ranks)


def test_an_unknown_operation_is_refused(ranks: list[Facts]) -> None:
    """An unknown operation is an `UnknownNameError`, on one process too."""
    assert all("UnknownNameError" in facts["bad_operation"] for facts in ranks)


def test_gathering(ranks: list[Facts], size: int) -> None:
    """`all_gather` stacks in rank order; with one process it is the identity."""
    expected = [[[rank + 1.0, 5.0]] for rank in range(size)] if size > 1 else [[1.0, 5.0]]
    assert all(facts["gathered"] == expected for facts in ranks)


def test_gradients_flow_through_gathering(ranks: list[Facts], size: int) -> None:
    """With `sync_grads` each rank's slice gets the gradient of every rank's use of it."""
    assert [facts["gathered_gradient"] for facts in ranks] == [[size * (rank + 1.0)] for rank in range(size)]


def test_gathering_objects(ranks: list[Facts], size: int) -> None:
    """Anything picklable is gathered in rank order."""
    assert all(facts["gathered_objects"] == [{"rank": rank} for rank in range(size)] for facts in ranks)


def test_a_barrier_waits(ranks: list[Facts]) -> None:
    """No rank passes the barrier before the slowest has reached it."""
    assert min(facts["passed_s"] for facts in ranks) >= max(facts["came_s"] for facts in ranks)


def test_broadcasting(ranks: list[Facts], size: int) -> None:
    """Every rank gets the source's value; a source that does not exist is refused."""
    for facts in ranks:
        assert facts["broadcast"] == {"from": 0}
        assert facts["broadcast_last"] == ["from", size - 1]
        assert "InvalidArgumentError" in facts["broadcast_bad"]


def test_decisions(ranks: list[Facts], size: int) -> None:
    """A decision of all, or of any, is the same on every rank, and a plain bool."""
    expected = {
        "all yes": True,
        "all no": False,
        "zero only, all": size == 1,
        "zero only, any": True,
        "last only, any": True,
        "none, any": False,
    }
    for facts in ranks:
        assert facts["decisions"] == expected
        assert {type(value) for value in facts["decisions"].values()} == {bool}


def test_wrapping(ranks: list[Facts], size: int) -> None:
    """A module that trains is wrapped in DDP where there are several ranks; unwrapping gives it back."""
    for facts in ranks:
        assert facts["is_wrapped"] is (size > 1)
        assert facts["unwrapped_is_own"]


def test_a_frozen_module_is_not_wrapped(ranks: list[Facts]) -> None:
    """A module without trainable parameters is returned unwrapped, and `no_backward_sync` accepts it."""
    for facts in ranks:
        assert facts["frozen_is_unwrapped"]
        assert facts["no_sync_of_frozen"] == ""


def test_parameters_start_as_rank_zeros(ranks: list[Facts]) -> None:
    """After `setup_module` every rank has rank 0's weights."""
    assert all(facts["bias"] == [0.0, 0.0] for facts in ranks)


def test_state_has_no_prefix(ranks: list[Facts]) -> None:
    """The keys of a state dict are the module's own, and loading writes into it."""
    for facts in ranks:
        assert facts["keys"] == facts["own_keys"]
        assert "module.first.weight" not in facts["keys"]
        assert facts["loaded"] == 0.0


def test_other_methods_go_through_the_wrapper(ranks: list[Facts]) -> None:
    """`call_method` runs as the wrapper's forward pass: the gradients are averaged, `forward` is back."""
    assert all(facts["forward_is_restored"] for facts in ranks)
    assert ranks[0]["gradient"] is not None
    for facts in ranks[1:]:
        assert facts["gradient"] == ranks[0]["gradient"]


def test_no_backward_sync_needs_the_wrapped_module(ranks: list[Facts], size: int) -> None:
    """With DDP, `no_backward_sync` of the unwrapped module is a TypeError."""
    assert all(("TypeError" in facts["no_sync_of_own"]) is (size > 1) for facts in ranks)


def test_one_reduction_in_four(ranks: list[Facts], size: int) -> None:
    """Under `no_backward_sync` three of four microbatches reduce nothing."""
    expected = [0, 0, 0, 1, 1, 1, 1, 2] if size > 1 else [0] * 8
    assert all(facts["reductions"] == expected for facts in ranks)


def test_checkpoints(ranks: list[Facts]) -> None:
    """Rank 0's checkpoint is what every rank reads; one that cannot be written is an error on all."""
    for facts in ranks:
        assert facts["checkpoint"] == (0, [0, 1, 2])
        assert "CheckpointError" in facts["bad_checkpoint"]


def test_batches_keep_their_shape(ranks: list[Facts]) -> None:
    """`batch_to_device` keeps nested containers, named tuples and values that are no tensors."""
    assert all(facts["batch"] for facts in ranks)


@pytest.mark.parametrize("kind", ["trained", "accumulated"])
def test_training_equals_one_process(kind: str, ranks: list[Facts]) -> None:
    """After 20 steps on the same global batches, split evenly, the weights are one process's to 1e-6."""
    for facts in ranks:
        for key, expected in trained_alone().items():
            torch.testing.assert_close(facts[kind][key], expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- a strategy's life

every_name = pytest.mark.parametrize("each", NAMES)


@every_name
def test_constructing(each: str) -> None:
    """A new strategy is not bound; each call gives another one, which cannot run collectives yet."""
    strategy = StrategyRegistry.create(each)
    assert not strategy.is_bound
    assert strategy.results == {}
    assert StrategyRegistry.create(each) is not strategy
    with pytest.raises(LifecycleError, match="configured"):
        strategy.barrier()


@every_name
def test_binding(each: str) -> None:
    """A strategy is bound once, and has a placement then, but no job."""
    strategy = StrategyRegistry.create(each, accelerator="cpu", devices=_size(each))
    assert strategy.bind() == strategy.ranks == strategy.placement.ranks
    assert strategy.world_size == _size(each)
    assert strategy.root_device == torch.device("cpu")
    with pytest.raises(LifecycleError, match=r"bind\(\) was called in state 'bound'"):
        strategy.bind()
    with pytest.raises(LifecycleError, match="in a job"):
        strategy.job  # noqa: B018 -- the property raises


@every_name
def test_deriving(each: str) -> None:
    """`with_` gives another strategy, not bound, with what was changed; the first one stays as it is."""
    strategy = StrategyRegistry.create(each, accelerator="cpu", devices=_size(each))
    strategy.bind()
    before = dict(vars(strategy))
    precision = MixedPrecision("bf16-mixed")
    derived = strategy.with_(precision=precision, timeout=7, devices=1)
    assert type(derived) is type(strategy)
    assert (derived.is_bound, derived.precision, derived.timeout) == (False, precision, timedelta(seconds=7))
    assert derived.bind().world_size == 1
    assert vars(strategy) == before
    with pytest.raises(UnknownArgumentError, match="Did you mean 'timeout'"):
        strategy.with_(timeut=7)
    with pytest.raises(InvalidTypeError, match="precision"):
        strategy.with_(precision=MixedPrecision)


@every_name
def test_pickling(each: str) -> None:
    """A pickle has everything but the launcher and the job: the same arguments, bound or not."""
    strategy = StrategyRegistry.create(
        each, accelerator="cpu", devices=_size(each), gradient_weighting="samples"
    )
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.is_bound, copy.process_config, copy.group_config) == (
        False,
        strategy.process_config,
        strategy.group_config,
    )
    ranks = strategy.bind()
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy.ranks, copy.root_device, copy.gradient_weighting) == (ranks, torch.device("cpu"), "samples")
    with pytest.raises(LifecycleError):
        copy.launcher  # noqa: B018 -- the property raises


@every_name
def test_attributes_that_are_arguments_can_be_set(each: str) -> None:
    """The attributes of a strategy with the names of its arguments can be set until it is bound."""
    strategy: Any = StrategyRegistry.create(each, accelerator="cpu", devices=_size(each))
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
    """After a launch a strategy can be pickled, whatever the ranks returned."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.launch(lambda _: lambda: None)
    assert strategy.results
    assert pickle.loads(pickle.dumps(strategy)).results == {}


def test_teardown_without_a_job() -> None:
    """`teardown` does nothing for a strategy that has no job."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.teardown()
    assert not strategy.is_bound


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
    monkeypatch.setattr("rankwise.strategies.variants.can_rerun", lambda: False)
    strategy = AutoStrategy(accelerator="cpu", devices=2)
    before = strategy.process_config
    strategy.bind()
    assert strategy.start_method == "fork"
    assert strategy.process_config == before
    assert strategy.with_().start_method == "popen"


@pytest.mark.parametrize("each", LAUNCHED_TWICE)
def test_launching_twice(each: str, results: _Results) -> None:
    """Both launches run on every rank, with gradients that are averaged."""
    mean = 1.5 if _size(each) == 2 else 1.0
    assert results.life_of(each)[0] == [
        [(number, rank, mean) for rank in range(_size(each))] for number in range(2)
    ]


@pytest.mark.parametrize("each", LAUNCHED_TWICE)
def test_one_strategy_for_two_trainers(each: str, results: _Results) -> None:
    """Two Trainers fit with one instance, one after the other, to the weights of one process."""
    single = fit_with_two_trainers(SingleDeviceStrategy(), 1)
    for (world_size, weights), (_, expected) in zip(results.life_of(each)[1], single, strict=True):
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


@pytest.mark.parametrize("alias", [name for name in NAMES if "_find_unused_parameters_" in name])
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


class HalfUsed(nn.Module):
    """Uses one of its two layers, alternately."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


def train_half(strategy: Strategy) -> bool:
    wrapped = strategy.setup_module(HalfUsed())
    for _ in range(2):
        wrapped(torch.ones(1, 2)).sum().backward()
    unused = cast(HalfUsed, strategy.unwrap_module(wrapped)).unused
    return unused.weight.grad is None or not bool(unused.weight.grad.any())


def test_unused_parameters_are_allowed_by_name() -> None:
    """`..._find_unused_parameters_true` trains a module with unused parameters."""
    name = "ddp_fork_find_unused_parameters_true"
    assert StrategyRegistry.create(name, accelerator="cpu", devices=2).launch(train_half) is True


@pytest.mark.parametrize("name", ["ddp_fork", "ddp_fork_find_unused_parameters_false"])
def test_unused_parameters_are_an_error_otherwise(name: str) -> None:
    """Without it the second step raises DDP's own error, with the rank."""
    with pytest.raises(WorkerRaisedError, match="find_unused_parameters"):
        StrategyRegistry.create(name, accelerator="cpu", devices=2).launch(train_half)


def zero_state(strategy: Strategy) -> tuple[int, list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = strategy.setup_module(nn.Linear(3, 3))
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.1)
    wrapped(torch.ones(1, 3)).sum().backward()
    strategy.optimizer_step(optimizer)
    state = strategy.get_optimizer_state(optimizer)
    return len(state.get("state", {})), strategy.all_gather_object(len(state))


def test_a_sharded_optimizer_is_consolidated() -> None:
    """Rank 0's state of a `ZeroRedundancyOptimizer` is whole; the others' is empty."""
    strategy = StrategyRegistry.create("ddp_fork", accelerator="cpu", devices=2)
    entries, lengths = strategy.launch(zero_state)
    assert entries == 2
    assert lengths[0] > 0
    assert lengths[1] == 0


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


partial_job = partial(closure_value)


def test_a_partial_function_is_launched() -> None:
    """Any callable that can be pickled can be launched."""
    strategy = StrategyRegistry.create("ddp_forkserver", accelerator="cpu", devices=2)
    assert strategy.launch(partial_job)[1] == pytest.approx(-1.0)

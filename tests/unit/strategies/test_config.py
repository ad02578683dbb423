"""What a strategy is constructed with, or bound to, and cannot work: refused before any process starts."""

import copy
import itertools
import math
import pickle
import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from rankwise import Launcher, Trainer
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.environments import NodesEnvironment, PlainEnvironment
from rankwise.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    LifecycleError,
    MissingAttributeError,
    RankwiseError,
    UnknownArgumentError,
    UnknownNameError,
)
from rankwise.launchers.context import Entry
from rankwise.precision import Precision
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.registry import StrategyRegistry
from rankwise.strategies import (
    DDPElasticStrategy,
    DDPForkStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from tests.helpers.raising import raises

BOTH = pytest.mark.parametrize("cls", [DDPStrategy, SingleDeviceStrategy])


def refused(cls: type[Strategy], **arguments: Any) -> Exception:
    """Return the error that constructing or binding raises; it must be one of rankwise's."""
    with pytest.raises((ConfigurationError, InvalidTypeError)) as caught:
        cls(**{"accelerator": "cpu", **arguments}).bind()
    return caught.value


NO_COUNT = [1.5, 2.0, None, True, {0}, {"a": 1}, b"2", object]
NO_DEVICES = [
    *(0, -2, "two", "0", "-3", "", "1.5", "0,0", "1,x", ","),
    *([0, 0], [], [-1], [0, "1"], [True], [0.5]),
]
NO_DURATION = [math.nan, math.inf, -math.inf, 1e30, 10**400]
NO_TIMEOUT = [0, -1, -0.5, 1e-9, timedelta(0), timedelta(seconds=-1)]
NO_NAME = [3, ["fork"], object(), b"fork"]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
VALUES: list[tuple[type[Exception], list[str], list[Any]]] = [
    (InvalidTypeError, ["start_method", "rendezvous", "process_group_backend", "accelerator"], NO_NAME),
    (UnknownNameError, ["start_method", "rendezvous", "process_group_backend"], [""]),
    (InvalidArgumentError, ["timeout", "init_timeout"], NO_TIMEOUT),
    (InvalidArgumentError, ["timeout", "init_timeout", "grace_period_s"], NO_DURATION),
    (InvalidTypeError, ["grace_period_s"], ["1", None, True]),
    (UnknownArgumentError, ["module", "device_ids", "output_device", "process_group", "dim"], [None]),
    (InvalidTypeError, ["parallel_devices"], [[], ["cpu"], [CPU, CUDA], "cpu", [0], CPU]),
    (InvalidTypeError, ["cluster_environment", "precision", "checkpoint_io"], [dict]),
    (InvalidArgumentError, ["grace_period_s"], [-0.1]),
]
"""Of errors, arguments and values of a `DDPStrategy`."""


@BOTH
@pytest.mark.parametrize(
    ("kind", "argument", "values"),
    [
        (InvalidArgumentError, "devices", NO_DEVICES),
        (InvalidTypeError, "devices", NO_COUNT),
        (InvalidArgumentError, "num_nodes", [0, -1]),
        (InvalidTypeError, "num_nodes", [1.0, "2", None, True, [1]]),
    ],
)
def test_counts_that_cannot_be(
    cls: type[Strategy], kind: type[Exception], argument: str, values: list[Any]
) -> None:
    """A number of devices or nodes, or a list of devices, is refused by its value or its type."""
    for value in values:
        error = refused(cls, **{argument: value})
        assert (type(error), error.argument) == (kind, argument), value  # type: ignore[attr-defined]  # both have it
    for value in (True, -1, 1.0, "1", None):
        assert isinstance(refused(DDPElasticStrategy, max_restarts=value), InvalidArgumentError)


@pytest.mark.parametrize(("kind", "arguments", "values"), VALUES)
def test_values_that_cannot_be(kind: type[Exception], arguments: list[str], values: list[Any]) -> None:
    """The error names the argument; DDP's own that the strategy fills in are unknown."""
    for argument, value in itertools.product(arguments, values):
        error = refused(DDPStrategy, **{argument: value})
        assert isinstance(error, kind), (argument, value)
        assert argument in str(error), value


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        *((1, 1), (3, 3), ("2", 2), ([0, 1], 2), ((0, 3), 2), ("0,1,2", 3), ("1,", 1)),
        *(("auto", 1), (-1, 1), ("-1", 1)),  # on the CPU "as many as there are" is one process
    ],
    ids=repr,
)
def test_devices_that_can_be(devices: Any, count: int) -> None:
    """A count, a list, or either as text; or devices, each of which is that of one local rank."""
    for given in (
        DDPForkStrategy(accelerator="cpu", devices=devices),
        DDPForkStrategy(parallel_devices=[torch.device("cpu")] * count),
    ):
        given.bind()
        assert (given.world_size, given.root_device) == (count, torch.device("cpu"))


PLAIN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
BY_HAND = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_ranks_that_nobody_starts_or_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes need a launcher; ranks of others meet in a TCP store; one that is alone meets nobody."""
    error = refused(DDPForkStrategy, devices=2, num_nodes=2)
    assert "torchrun --nnodes=2 --nproc-per-node=2" in str(error)
    environments = {
        "plain has started the ranks": PlainEnvironment(PLAIN),
        "the job has several nodes": NodesEnvironment(BY_HAND),
    }
    for reason, environment in environments.items():
        text = str(refused(DDPForkStrategy, rendezvous="private", cluster_environment=environment))
        assert reason in text
        assert 'leave rendezvous at "auto"' in text
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a process that is a rank for good keeps
    alone = PlainEnvironment({**PLAIN, "WORLD_SIZE": "1"})
    strategy = DDPForkStrategy(rendezvous="private", cluster_environment=alone, accelerator="cpu")
    assert strategy.bind().world_size == 1


@BOTH
@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("accelerator", "cpuu", "Unknown accelerator 'cpuu'"),
        ("accelerator", "ddp", "a strategy is meant"),
        ("accelerator", 3, "accelerator=3"),
        ("cluster_environment", "slrum", "Did you mean 'slurm'"),
    ],
)
def test_names_are_checked_at_once(cls: type[Strategy], argument: str, value: object, text: str) -> None:
    """An unknown accelerator or environment is an error of the constructor and of `with_`."""
    raises(RankwiseError, text, cls, **{argument: value})
    raises(RankwiseError, text, cls().with_, **{argument: value})
    elsewhere = cls(accelerator="cuda", cluster_environment="slurm")  # of these, `bind` asks more
    raises(ConfigurationError, None, elsewhere.bind)


def test_single_device_is_single() -> None:
    """Two of anything are refused, with the strategy that takes them."""
    for argument in ("devices", "num_nodes"):
        error = refused(SingleDeviceStrategy, **{argument: 2})
        assert isinstance(error, InvalidArgumentError)
        assert 'strategy="ddp"' in str(error)


@pytest.mark.parametrize(
    ("argument", "typos"),
    [
        ("start_method", {"forky": "fork", "forkserve": "forkserver", "popn": "popen"}),
        ("rendezvous", {"tpc": "tcp", "privat": "private"}),
        ("process_group_backend", {"ncll": "nccl", "glo": "gloo"}),
        ("accelerator", {"cudda": "cuda"}),
    ],
)
def test_typos_are_answered(argument: str, typos: dict[str, str]) -> None:
    """A name that is none suggests the nearest; case does not matter."""
    for typo, meant in typos.items():
        error = refused(DDPStrategy, **{argument: typo})
        assert isinstance(error, UnknownNameError)
        assert f"{argument} {typo!r}. Did you mean {meant!r}?" in str(error)
    for name in ("FORK", "Fork"):
        assert DDPStrategy(start_method=name).start_method == "fork"


def test_durations() -> None:
    """They are seconds or a `timedelta`, which mean the same; the error says how to write one."""
    for argument, value in itertools.product(("timeout", "init_timeout"), ("10", None, True, [1], (1, 2))):
        error = refused(DDPStrategy, **{argument: value})
        assert isinstance(error, InvalidTypeError)
        assert f"{argument}=timedelta(seconds=...)" in str(error), value
    assert "Fix: timeout=timedelta(seconds=...)" in str(refused(DDPStrategy, timeout=float))
    durations: dict[Any, float] = {10: 10.0, 0.5: 0.5, timedelta(minutes=1): 60.0}
    for value, seconds in durations.items():
        assert DDPStrategy(timeout=value).timeout.total_seconds() == seconds
    for grace in (0, 365 * 24 * 3600):  # from none to a year
        assert DDPStrategy(grace_period_s=grace).grace_period_s == float(grace)


class Own(DDPStrategy):
    """Has an argument of its own."""

    def __init__(self, *, alpha: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.alpha = alpha


@pytest.mark.parametrize(
    ("strategy", "typo", "answer"),
    [
        (DDPStrategy, "find_unused_parameter", " Did you mean 'find_unused_parameters'?"),
        (DDPStrategy, "gradient_as_bucketview", " Did you mean 'gradient_as_bucket_view'?"),
        (DDPStrategy, "start_methd", " Did you mean 'start_method'?"),
        (DDPStrategy, "bucket_capmb", " Did you mean 'bucket_cap_mb'?"),
        (DDPStrategy, "device", " Did you mean 'devices'?"),
        (Own, "alhpa", " Did you mean 'alpha'?"),
        (DDPStrategy, "gradients", ""),
        (SingleDeviceStrategy, "start_method", ""),
    ],
)
def test_unknown_keywords_are_answered(strategy: type[Strategy], typo: str, answer: str) -> None:
    """The nearest of strategy, subclass and DDP is suggested; what is decided for a base class is refused."""
    error = refused(strategy, **{typo: 2})
    assert isinstance(error, UnknownArgumentError)
    assert isinstance(error, TypeError)
    assert f"{strategy.__name__} takes no argument {typo!r}.{answer}" in str(error)


def test_ddps_keywords_are_kept() -> None:
    """Those of this torch's DDP reach it; unused parameters are not looked for unless asked."""
    strategy = DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=5)
    expected = {"find_unused_parameters": False, "gradient_as_bucket_view": True, "bucket_cap_mb": 5}
    assert strategy.ddp_kwargs == expected
    # Logged weights divide gradients bucket by bucket; what the user says counts.
    assert DDPStrategy(gradient_weighting="logged").ddp_kwargs["gradient_as_bucket_view"] is True
    strategy = DDPStrategy(gradient_weighting="logged", gradient_as_bucket_view=False)
    assert strategy.ddp_kwargs["gradient_as_bucket_view"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("accelerator", ["cuda", "gpu"])
def test_an_accelerator_must_be_there(accelerator: str) -> None:
    """Without a CUDA device, asking for one is an error that says what to use."""
    error = refused(DDPStrategy, accelerator=accelerator)
    assert "torch sees no CUDA device" in str(error)
    assert 'accelerator="cpu"' in str(error)


def test_what_bind_gives() -> None:
    """Its numbers win over the constructor's, and are checked; a refusal leaves the strategy free."""
    strategies = [DDPForkStrategy(accelerator="cpu", devices=3) for _ in range(3)]
    assert strategies[0].bind().world_size == 3
    assert strategies[1].bind(devices=2).world_size == 2
    wrong: list[Any] = [0, 1.5, "two"]
    for devices in wrong:
        with pytest.raises((InvalidArgumentError, InvalidTypeError), match="devices"):
            strategies[2].bind(devices=devices)
        assert not strategies[2].is_bound
    assert strategies[2].bind(devices=2).world_size == 2


FACTS = """ranks global_rank local_rank node_rank world_size local_world_size num_nodes is_global_zero
root_device environment launcher runs_in_caller distributed_sampler_kwargs"""


@pytest.mark.parametrize("name", FACTS.split())
def test_facts_need_bind(name: str) -> None:
    """Before `bind` a fact is a `LifecycleError` about the attribute that was read, not a guess."""
    raises(LifecycleError, "bind", getattr, DDPForkStrategy(accelerator="cpu", devices=2), name)
    with pytest.raises(LifecycleError, match="root_device was read in state 'configured'"):
        DDPStrategy().root_device  # noqa: B018  the property raises


def test_the_number_of_nodes_is_an_argument() -> None:
    """What `bind` and the launch determine is read-only; the error says where it is given."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.bind()
    for name in ("ranks", "world_size", "environment", "runs_in_caller", "worker"):
        raises(AttributeError, f"{name!r} cannot be set", setattr, strategy, name, 2)
    message = r"'num_nodes' cannot be set: .* Write DDPForkStrategy\(num_nodes=2\), or bind\(num_nodes=2\)\."
    with pytest.raises(AttributeError, match=message):
        DDPForkStrategy(accelerator="cpu", devices=2).num_nodes = 2  # on purpose


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("num_processes", "strategy.local_world_size"),
        ("parallel_devices", "strategy.placement.devices"),
        ("cluster_environment", "strategy.environment"),
        ("precision_plugin", "strategy.precision"),
    ],
)
@pytest.mark.parametrize("kind", [DDPForkStrategy, SingleDeviceStrategy])
def test_attributes_of_lightnings_strategies(kind: type[Any], name: str, write: str) -> None:
    """To read or to set one is an error that says what to write, which exists."""
    strategy = kind(accelerator="cpu")
    strategy.bind()
    assert eval(write) is not None
    assert not hasattr(strategy, name)
    refused = partial(pytest.raises, MissingAttributeError, match=f"Strategy has no {name}.*\n.*Fix: {write}")
    with refused():
        getattr(strategy, name)
    with refused():
        setattr(strategy, name, 1)


def test_a_single_device_strategy_runs_here() -> None:
    """A launch is a call, nothing is pickled; the launched function cannot give it to a Trainer."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    value: object = object()
    assert strategy.launch(lambda strategy: value) is value
    assert strategy.runs_in_caller
    assert strategy.results == {0: value}
    raises(LifecycleError, "in a job", strategy.launch, lambda running: Trainer(strategy=running))
    assert strategy.launch(lambda running: running.job.worker.ranks) == strategy.ranks


class LockedPrecision(Precision):
    """A plug-in with a lock, which `copy` and `pickle` refuse."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def trainer_of(strategy: Strategy, **arguments: Any) -> Trainer:
    """Return a Trainer for one process on the CPU that writes no files."""
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **arguments
    )


def test_a_precision_that_cannot_be_copied() -> None:
    """The first trainer takes it over from a strategy that is not bound; another one needs its own."""
    precision = LockedPrecision()
    strategy = SingleDeviceStrategy(precision=precision)
    assert trainer_of(strategy, plugins=[TorchCheckpointIO()]).strategy.precision is precision
    raises(ConfigurationError, "contradict each other", trainer_of, strategy, precision="64-true")
    strategy = SingleDeviceStrategy(precision=LockedPrecision())
    assert trainer_of(strategy).strategy is strategy
    with pytest.raises(ConfigurationError, match=r"LockedPrecision\('32-true'\) cannot be copied.*\n.*lock"):
        trainer_of(strategy)
    assert trainer_of(strategy, plugins=[LockedPrecision()]).world_size == 1


@pytest.mark.parametrize("name", ["ddp_fork", "ddp_elastic"])
def test_an_interface_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is refused by name before anything starts, where gloo would use it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    with pytest.raises(ConfigurationError, match="GLOO_SOCKET_IFNAME='lo,nowhere0' names no"):
        StrategyRegistry.create(name, accelerator="cpu", devices=2).bind()
    StrategyRegistry.create(name, accelerator="cpu", devices=2, process_group_backend="mpi").bind()


class IdleLauncher(Launcher):
    """Starts nothing."""

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        return {}


def test_a_given_launcher_starts_all_ranks() -> None:
    """It gets the ranks of all nodes, and stays as it is for other strategies."""
    given = IdleLauncher()
    strategy = DDPStrategy(launcher=given, accelerator="cpu", devices=2, num_nodes=2, grace_period_s=3)
    strategy.bind()
    bound = strategy.launcher
    assert list(bound.all_ranks) == [RankInfo(rank, rank % 2, rank // 2, 4, 2, 2) for rank in range(4)]
    assert bound.options.grace_period_s == 3
    assert "all_ranks" not in vars(given)
    assert copy.deepcopy(strategy.process_config).launcher is given
    assert pickle.loads(pickle.dumps(strategy)).process_config.launcher is None


@pytest.mark.parametrize(
    ("cls", "arguments", "text"),
    [
        (DDPStrategy, {"launcher": IdleLauncher}, r"expected an instance of Launcher.*IdleLauncher\(\)"),
        (DDPStrategy, {"start_method": "fork"}, "no other way to start them"),
        (DDPStrategy, {"command": ["train"]}, "no other way to start them"),
        (DDPStrategy, {"rendezvous": "private"}, "this launcher have no channels"),
        (DDPForkStrategy, {}, "no other way to start them"),
        (DDPElasticStrategy, {}, "no other way to start them"),
        (DDPStrategy, {"cluster_environment": PlainEnvironment(PLAIN)}, "has started the ranks already"),
        (DDPStrategy, {"cluster_environment": NodesEnvironment(BY_HAND)}, "this is node 0 of the job"),
    ],
)
def test_a_given_launcher_and_another_one(cls: type[Strategy], arguments: Any, text: str) -> None:
    """Two ways to start the ranks contradict each other, and so does a launcher that is none."""
    assert re.search(text, str(refused(cls, **{"launcher": IdleLauncher(), **arguments})), re.DOTALL)

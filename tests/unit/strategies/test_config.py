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
from rankwise.environments import ClusterEnvironment, NodesEnvironment, PlainEnvironment
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
from rankwise.ranks import rank_zero_only
from rankwise.registry import StrategyRegistry
from rankwise.strategies import (
    DDPElasticStrategy,
    DDPForkStrategy,
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)

BOTH = pytest.mark.parametrize("cls", [DDPStrategy, SingleDeviceStrategy])


def refused(cls: type[Strategy], **arguments: Any) -> Exception:
    """Return the error that constructing or binding raises; it must be one of rankwise's."""
    with pytest.raises((ConfigurationError, InvalidTypeError)) as caught:
        cls(**{"accelerator": "cpu", **arguments}).bind()
    return caught.value


NO_COUNT = [1.5, 2.0, None, True, {0}, {"a": 1}, b"2", object]
NO_DEVICES = [
    0,
    -2,
    "two",
    "0",
    "-3",
    "",
    "1.5",
    "0,0",
    "1,x",
    ",",
    [0, 0],
    [],
    [-1],
    [0, "1"],
    [True],
    [0.5],
]
NO_DURATION = [math.nan, math.inf, -math.inf, 1e30, 10**400]
NO_NAME = [3, ["fork"], object(), b"fork"]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
VALUES: list[tuple[type[Exception], list[str], list[Any]]] = [
    (InvalidTypeError, ["start_method", "rendezvous", "process_group_backend", "accelerator"], NO_NAME),
    (UnknownNameError, ["start_method", "rendezvous", "process_group_backend"], [""]),
    (
        InvalidArgumentError,
        ["timeout", "init_timeout"],
        [0, -1, -0.5, 1e-9, timedelta(0), timedelta(seconds=-1)],
    ),
    (InvalidArgumentError, ["timeout", "init_timeout", "grace_period_s"], NO_DURATION),
    (InvalidTypeError, ["grace_period_s"], ["1", None, True]),
    (UnknownArgumentError, ["module", "device_ids", "output_device", "process_group", "dim"], [None]),
    (InvalidTypeError, ["parallel_devices"], [[], ["cpu"], [CPU, CUDA], "cpu", [0], CPU]),
    (InvalidTypeError, ["cluster_environment", "precision", "checkpoint_io"], [dict]),
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


@pytest.mark.parametrize(("kind", "arguments", "values"), VALUES)
def test_values_that_cannot_be(kind: type[Exception], arguments: list[str], values: list[Any]) -> None:
    """The error names the argument; DDP's own that the strategy fills in are unknown."""
    for argument, value in itertools.product(arguments, values):
        error = refused(DDPStrategy, **{argument: value})
        assert isinstance(error, kind), (argument, value)
        assert argument in str(error), value


def test_restarts_are_counted() -> None:
    """`max_restarts` is a whole number from 0 on."""
    for value in (True, -1, 1.0, "1", None):
        assert isinstance(refused(DDPElasticStrategy, max_restarts=value), InvalidArgumentError)


@pytest.mark.parametrize("devices", [0, 1.5, "two"])
def test_bind_checks_devices_too(devices: Any) -> None:
    """What a Trainer passes on is checked like the constructor's own."""
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match="devices"):
        DDPStrategy(accelerator="cpu").bind(devices=devices)


@pytest.mark.parametrize(
    ("devices", "count"),
    [(1, 1), (3, 3), ("2", 2), ([0, 1], 2), ((0, 3), 2), ("0,1,2", 3), ("1,", 1)],
    ids=repr,
)
def test_devices_that_can_be(devices: Any, count: int) -> None:
    """A count, a list, or either as text."""
    strategy = DDPForkStrategy(accelerator="cpu", devices=devices)
    strategy.bind()
    assert strategy.world_size == count
    assert strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("devices", ["auto", -1, "-1"])
def test_all_devices_of_a_cpu_are_one(devices: Any) -> None:
    """On the CPU "as many as there are" is one process."""
    strategy = DDPForkStrategy(accelerator="cpu", devices=devices)
    strategy.bind()
    assert strategy.world_size == 1


def test_several_nodes_need_a_launcher() -> None:
    """Nobody has started the other node: the error gives the command that would."""
    error = refused(DDPForkStrategy, devices=2, num_nodes=2)
    assert "torchrun --nnodes=2 --nproc-per-node=2" in str(error)


PLAIN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
BY_HAND = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (PlainEnvironment(PLAIN), "plain has started the ranks"),
        (NodesEnvironment(BY_HAND), "the job has several nodes"),
    ],
    ids=["external", "nodes"],
)
def test_a_private_rendezvous_that_cannot_be(environment: ClusterEnvironment, reason: str) -> None:
    """Ranks that others have started, and several nodes, meet in a TCP store: that is said."""
    error = refused(DDPForkStrategy, rendezvous="private", cluster_environment=environment)
    assert reason in str(error)
    assert 'leave rendezvous at "auto"' in str(error)


def test_a_private_rendezvous_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is alone meets nobody: nothing listens, whoever has started it."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which a process that is a rank for good keeps
    alone = PlainEnvironment({**PLAIN, "WORLD_SIZE": "1"})
    strategy = DDPForkStrategy(rendezvous="private", cluster_environment=alone, accelerator="cpu")
    assert strategy.bind().world_size == 1


@pytest.mark.parametrize("strategy", [DDPStrategy, SingleDeviceStrategy])
@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("accelerator", "cpuu", "Unknown accelerator 'cpuu'"),
        ("accelerator", "ddp", "a strategy is meant"),
        ("accelerator", 3, "accelerator=3"),
        ("cluster_environment", "slrum", "Did you mean 'slurm'"),
    ],
)
def test_names_are_checked_at_once(strategy: type[Strategy], argument: str, value: object, text: str) -> None:
    """An unknown accelerator or environment is an error of the constructor, and of `with_`."""
    with pytest.raises(RankwiseError, match=text):
        strategy(**{argument: value})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(RankwiseError, match=text):
        strategy().with_(**{argument: value})


def test_what_exists_elsewhere_is_no_error_yet() -> None:
    """A name is enough for the constructor: devices and variables are looked at by `bind`."""
    strategy = DDPStrategy(accelerator="cuda", cluster_environment="slurm")
    with pytest.raises(ConfigurationError):
        strategy.bind()


@pytest.mark.parametrize(("argument", "value"), [("devices", 2), ("num_nodes", 2)])
def test_single_device_is_single(argument: str, value: int) -> None:
    """Two of anything are refused, with the strategy that takes them."""
    error = refused(SingleDeviceStrategy, **{argument: value})
    assert isinstance(error, InvalidArgumentError)
    assert 'strategy="ddp"' in str(error)


@pytest.mark.parametrize(
    ("argument", "typo", "meant"),
    [
        ("start_method", "forky", "fork"),
        ("start_method", "forkserve", "forkserver"),
        ("start_method", "popn", "popen"),
        ("rendezvous", "tpc", "tcp"),
        ("rendezvous", "privat", "private"),
        ("process_group_backend", "ncll", "nccl"),
        ("process_group_backend", "glo", "gloo"),
        ("accelerator", "cudda", "cuda"),
    ],
)
def test_typos_are_answered(argument: str, typo: str, meant: str) -> None:
    """A name that is none suggests the nearest."""
    error = refused(DDPStrategy, **{argument: typo})
    assert isinstance(error, UnknownNameError)
    assert f"{argument} {typo!r}. Did you mean {meant!r}?" in str(error)


@pytest.mark.parametrize("name", ["FORK", "Fork"])
def test_names_in_any_case(name: str) -> None:
    """Case does not matter."""
    assert DDPStrategy(start_method=name).start_method == "fork"


@pytest.mark.parametrize("argument", ["timeout", "init_timeout"])
@pytest.mark.parametrize("value", ["10", None, True, [1], (1, 2)], ids=repr)
def test_timeouts_are_durations(argument: str, value: object) -> None:
    """A timeout is a number of seconds or a `timedelta`; the error says how to write one."""
    error = refused(DDPStrategy, **{argument: value})
    assert isinstance(error, InvalidTypeError)
    assert f"{argument}=timedelta(seconds=...)" in str(error)


@pytest.mark.parametrize(
    ("value", "expected"), [(10, 10.0), (0.5, 0.5), (timedelta(minutes=1), 60.0)], ids=repr
)
def test_timeouts_in_both_kinds(value: Any, expected: float) -> None:
    """Seconds and `timedelta` mean the same."""
    assert DDPStrategy(timeout=value).timeout.total_seconds() == expected


def test_a_grace_has_limits() -> None:
    """From none to a year."""
    assert isinstance(refused(DDPStrategy, grace_period_s=-0.1), InvalidArgumentError)
    for value in (0, 365 * 24 * 3600):
        assert DDPStrategy(grace_period_s=value).grace_period_s == float(value)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("find_unused_parameter", "find_unused_parameters"),
        ("gradient_as_bucketview", "gradient_as_bucket_view"),
        ("start_methd", "start_method"),
        ("bucket_capmb", "bucket_cap_mb"),
        ("device", "devices"),
    ],
)
def test_unknown_keywords_are_answered(typo: str, meant: str) -> None:
    """A keyword that neither the strategy nor DDP takes suggests the nearest of both."""
    error = refused(DDPStrategy, **{typo: True})
    assert isinstance(error, UnknownArgumentError)
    assert isinstance(error, TypeError)
    assert f"DDPStrategy takes no argument {typo!r}. Did you mean {meant!r}?" in str(error)


class Own(DDPStrategy):
    """Has an argument of its own."""

    def __init__(self, *, alpha: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.alpha = alpha


@pytest.mark.parametrize(
    ("strategy", "name", "answer"),
    [
        (Own, "alhpa", "Own takes no argument 'alhpa'. Did you mean 'alpha'?"),
        (DDPStrategy, "gradients", "DDPStrategy takes no argument 'gradients'."),
        (SingleDeviceStrategy, "start_method", "SingleDeviceStrategy takes no argument 'start_method'."),
    ],
)
def test_keywords_of_other_constructors(strategy: type[Strategy], name: str, answer: str) -> None:
    """A subclass's own are suggested; those that a strategy decides for its base class are refused."""
    assert answer in str(refused(strategy, **{name: 2}))


def test_an_attribute_of_a_later_state_is_named() -> None:
    """The error is about the attribute that was read, not about where it would come from."""
    with pytest.raises(LifecycleError, match="root_device was read in state 'configured'"):
        DDPStrategy().root_device  # noqa: B018  the property raises


def test_ddps_keywords_are_kept() -> None:
    """Keywords of this torch's DDP reach it; unused parameters are not looked for unless asked."""
    strategy = DDPStrategy(gradient_as_bucket_view=True, bucket_cap_mb=5)
    assert strategy.ddp_kwargs == {
        "find_unused_parameters": False,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 5,
    }


def test_logged_weights_have_gradients_in_buckets() -> None:
    """By default, as they are then divided bucket by bucket; what the user says counts."""
    assert DDPStrategy(gradient_weighting="logged").ddp_kwargs["gradient_as_bucket_view"] is True
    strategy = DDPStrategy(gradient_weighting="logged", gradient_as_bucket_view=False)
    assert strategy.ddp_kwargs["gradient_as_bucket_view"] is False


def test_parallel_devices_count() -> None:
    """Each is the device of one local rank."""
    strategy = DDPForkStrategy(parallel_devices=[torch.device("cpu")] * 3)
    strategy.bind()
    assert (strategy.world_size, strategy.root_device.type) == (3, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("accelerator", ["cuda", "gpu"])
def test_an_accelerator_must_be_there(accelerator: str) -> None:
    """Without a CUDA device, asking for one is an error that says what to use."""
    error = refused(DDPStrategy, accelerator=accelerator)
    assert "torch sees no CUDA device" in str(error)
    assert 'accelerator="cpu"' in str(error)


def test_a_class_instead_of_a_duration() -> None:
    """The remedy for a wrong type is the argument's own, for a class of the right type too."""
    assert "Fix: timeout=timedelta(seconds=...)" in str(refused(DDPStrategy, timeout=float))


def test_what_was_bound_stays() -> None:
    """The constructor's numbers hold where `bind` gives none, and `bind`'s win where it does."""
    first, second = (
        DDPForkStrategy(accelerator="cpu", devices=3),
        DDPForkStrategy(accelerator="cpu", devices=3),
    )
    assert first.bind().world_size == 3
    assert second.bind(devices=2).world_size == 2


def test_a_failed_bind_leaves_the_strategy_free() -> None:
    """After a refusal the strategy can be bound to something else."""
    strategy = DDPForkStrategy(accelerator="cpu")
    with pytest.raises(InvalidArgumentError):
        strategy.bind(devices=0)
    assert not strategy.is_bound
    assert strategy.bind(devices=2).world_size == 2


@pytest.mark.parametrize(
    "name",
    [
        "ranks",
        "global_rank",
        "local_rank",
        "node_rank",
        "world_size",
        "local_world_size",
        "num_nodes",
        "is_global_zero",
        "root_device",
        "environment",
        "launcher",
        "runs_in_caller",
        "distributed_sampler_kwargs",
    ],
)
def test_facts_need_bind(name: str) -> None:
    """Before `bind` a fact is a `LifecycleError`, not a guess."""
    with pytest.raises(LifecycleError, match="bind"):
        getattr(DDPForkStrategy(accelerator="cpu", devices=2), name)


@pytest.mark.parametrize("name", ["ranks", "world_size", "environment", "runs_in_caller", "worker"])
def test_facts_cannot_be_set(name: str) -> None:
    """What `bind` and the launch determine is read-only."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    strategy.bind()
    with pytest.raises(AttributeError, match=f"{name!r} cannot be set"):
        setattr(strategy, name, 2)


def test_the_number_of_nodes_is_an_argument() -> None:
    """Lightning's strategies let it be set; the error says where it is given here."""
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
    """With one device a launch is a call, and nothing is pickled."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    value: object = object()
    assert strategy.launch(lambda strategy: value) is value
    assert strategy.runs_in_caller
    assert strategy.results == {0: value}


def test_a_strategy_in_a_job_is_not_copied() -> None:
    """A launched function that gives its strategy to a Trainer gets a `LifecycleError`."""
    strategy = SingleDeviceStrategy(accelerator="cpu")
    with pytest.raises(LifecycleError, match="in a job"):
        strategy.launch(lambda running: Trainer(strategy=running))
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


def test_a_precision_that_cannot_be_copied_is_shared() -> None:
    """A trainer takes over the plug-in of a strategy that is not bound; another one contradicts it."""
    precision = LockedPrecision()
    strategy = SingleDeviceStrategy(precision=precision)
    assert trainer_of(strategy, plugins=[TorchCheckpointIO()]).strategy.precision is precision
    with pytest.raises(ConfigurationError, match="contradict each other"):
        trainer_of(strategy, precision="64-true")


def test_a_precision_that_another_trainer_uses_is_not_shared() -> None:
    """A second trainer for one strategy needs a plug-in of its own if the first's cannot be copied."""
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
    places = [
        (each.global_rank, each.local_rank, each.node_rank, each.world_size) for each in bound.all_ranks
    ]
    assert places == [(0, 0, 0, 4), (1, 1, 0, 4), (2, 0, 1, 4), (3, 1, 1, 4)]
    assert bound.options.grace_period_s == 3
    assert "all_ranks" not in vars(given)
    assert copy.deepcopy(strategy.process_config).launcher is given
    assert pickle.loads(pickle.dumps(strategy)).process_config.launcher is None


RANK_BY_HAND = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}
NODE_BY_HAND = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("cls", "arguments", "text"),
    [
        (DDPStrategy, {"launcher": IdleLauncher}, r"expected an instance of Launcher.*IdleLauncher\(\)"),
        (DDPStrategy, {"start_method": "fork"}, "no other way to start them"),
        (DDPStrategy, {"command": ["train"]}, "no other way to start them"),
        (DDPStrategy, {"rendezvous": "private"}, "this launcher have no channels"),
        (DDPForkStrategy, {}, "no other way to start them"),
        (DDPElasticStrategy, {}, "no other way to start them"),
        (
            DDPStrategy,
            {"cluster_environment": PlainEnvironment(RANK_BY_HAND)},
            "has started the ranks already",
        ),
        (DDPStrategy, {"cluster_environment": NodesEnvironment(NODE_BY_HAND)}, "this is node 0 of the job"),
    ],
)
def test_a_given_launcher_and_another_one(cls: type[Strategy], arguments: Any, text: str) -> None:
    """Two ways to start the ranks contradict each other, and so does a launcher that is none."""
    assert re.search(text, str(refused(cls, **{"launcher": IdleLauncher(), **arguments})), re.DOTALL)

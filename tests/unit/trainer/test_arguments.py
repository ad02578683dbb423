"""The Trainer's arguments: the constructor refuses wrong ones."""

import inspect
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise.callbacks
from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.compatibility.names import TRAINER_ARGUMENTS
from rankwise.environments import LocalEnvironment, NodesEnvironment
from rankwise.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    UnknownArgumentError,
    UnknownNameError,
    UnknownStrategyError,
)
from rankwise.fabric import Fabric
from rankwise.loggers import CSVLogger
from rankwise.precision import DoublePrecision, MixedPrecision, Precision
from rankwise.strategies import DDPSpawnStrategy, SingleDeviceStrategy
from rankwise.strategies.config import agreed_value
from rankwise.trainer import Trainer
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import trainer

NODES = {"NODE_RANK": "0", "NNODES": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


IMPOSSIBLE: list[tuple[str, Any]] = [
    *(("max_epochs", -2), ("max_steps", -2), ("min_epochs", -1), ("limit_train_batches", 1.5)),
    *(("limit_val_batches", -1), ("limit_test_batches", -0.1), ("limit_predict_batches", math.nan)),
    *(("fast_dev_run", -1), ("check_val_every_n_epoch", 0), ("accumulate_grad_batches", 0)),
    *(("gradient_clip_val", -1), ("gradient_clip_algorithm", "size"), ("log_every_n_steps", 0)),
    *(("devices", 0), ("devices", -2), ("devices", [0, 0]), ("num_nodes", 0)),
    *(("enable_checkpointing", "yes"), ("enable_progress_bar", "no"), ("use_distributed_sampler", None)),
    *(("on_nonfinite", "stop"), ("uneven_inputs", "joint"), ("deterministic", "maybe")),
    *(("benchmark", "yes"), ("sync_batchnorm", 2), ("num_sanity_val_steps", -2)),
    *(("model_registry", "name"), ("min_steps", -1), ("overfit_batches", 1.5), ("inference_mode", None)),
    *(("val_check_interval", 0), ("val_check_interval", "ten minutes")),
    *(("val_check_interval", {"minute": 1}), ("val_check_interval", timedelta(seconds=-1))),
]
WRONG_KINDS: list[tuple[str, Any]] = [
    *(("max_epochs", "3"), ("max_epochs", True), ("max_steps", 2.0), ("limit_train_batches", "all")),
    *(("accumulate_grad_batches", None), ("gradient_clip_val", "1"), ("precision", 3.5), ("strategy", 3)),
    *(("strategy", DDPSpawnStrategy), ("plugins", [3]), ("callbacks", [print])),
    *(("callbacks", EarlyStopping), ("logger", 3), ("devices", 1.5)),
    *(("overfit_batches", True), ("num_sanity_val_steps", True)),
]


@pytest.mark.parametrize(("name", "kind"), [("PL_TRAINER_DEVICES", Trainer), ("LT_PRECISION", Fabric)])
def test_variables_of_lightning(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's class of that name reads them in place of an argument; empty ones count as undefined."""
    monkeypatch.setenv(name, "")
    kind()
    monkeypatch.setenv(name, "4")
    raises(ConfigurationError, rf"^{name}='4' is set.*\n  Fix: unset it, .* {kind.__name__}\(", kind)


@pytest.mark.parametrize(("name", "value"), [*IMPOSSIBLE, *WRONG_KINDS])
def test_refused_values(tmp_path: Path, name: str, value: Any) -> None:
    """A value out of range or of a wrong type is refused, naming the argument."""
    error = InvalidTypeError if (name, value) in WRONG_KINDS else InvalidArgumentError
    with pytest.raises(error) as caught:
        trainer(tmp_path, **{name: value})
    assert vars(caught.value)["argument"] == name
    if value is DDPSpawnStrategy:
        assert "make an instance of it: DDPSpawnStrategy()" in str(caught.value)


def test_unknown_names(tmp_path: Path) -> None:
    """Unknown strategies, precisions and environments are refused by name."""
    raises(UnknownStrategyError, "Did you mean 'ddp'", trainer, tmp_path, strategy="dpp")
    raises(UnknownNameError, "Unknown precision '8-bit'", trainer, tmp_path, precision="8-bit")
    raises(UnknownNameError, "Did you mean 'torchelastic'", trainer, tmp_path, plugins="torchelastc")


def test_plugins_by_kind(tmp_path: Path) -> None:
    """Each plug-in is used for its kind; an environment may be named."""
    precision, checkpoint_io, environment = Precision(), TorchCheckpointIO(), LocalEnvironment()
    strategy = SingleDeviceStrategy()
    plugins = [precision, checkpoint_io, environment, strategy]
    train = trainer(tmp_path, strategy="auto", plugins=plugins)
    assert trainer(tmp_path, plugins=["local"]).strategy.environment.name == "local"
    assert type(train.strategy) is SingleDeviceStrategy
    assert train.strategy.precision is precision
    assert train.strategy.checkpoint_io is checkpoint_io
    assert train.strategy.environment is environment
    assert not strategy.is_bound
    assert strategy.precision is not precision


@pytest.mark.parametrize(
    "options",
    [
        *({"plugins": [Precision(), Precision()]}, {"plugins": ["local", LocalEnvironment()]}),
        *({"plugins": [Precision()], "precision": 32}, {"min_epochs": 3, "max_epochs": 2}),
        *({"plugins": [SingleDeviceStrategy()], "strategy": "ddp"}, {"min_steps": 3, "max_steps": 2}),
        {"callbacks": ModelCheckpoint(), "enable_checkpointing": False},
        {"callbacks": TQDMProgressBar(), "enable_progress_bar": False},
        {"callbacks": [EarlyStopping("loss"), EarlyStopping("loss")]},
        *({"overfit_batches": 2, "limit_train_batches": 3}, {"overfit_batches": 2, "limit_val_batches": 1}),
        {"overfit_batches": 2, "fast_dev_run": True},
        {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
    ],
)
def test_contradictions(tmp_path: Path, options: dict[str, Any]) -> None:
    """Contradicting arguments are refused."""
    raises(ConfigurationError, None, trainer, tmp_path, **options)


def strategy_with(**options: Any) -> DDPSpawnStrategy:
    """Return a strategy that has arguments of its own."""
    return DDPSpawnStrategy(**{"accelerator": "cpu", "devices": 3, **options})


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ({}, {"devices": 2}),
        ({}, {"devices": [0, 1]}),
        ({"devices": [0, 2]}, {"devices": [0, 1]}),
        ({"accelerator": "cuda"}, {"accelerator": "cpu"}),
        ({"num_nodes": 2}, {"num_nodes": 3}),
        ({"cluster_environment": "slurm"}, {"plugins": ["local"]}),
        ({"cluster_environment": LocalEnvironment()}, {"plugins": ["slurm"]}),
        ({"cluster_environment": NodesEnvironment(NODES)}, {"plugins": [NodesEnvironment({})]}),
        ({"precision": MixedPrecision("bf16-mixed")}, {"precision": "16-mixed"}),
        ({"precision": Precision()}, {"precision": "16-mixed"}),
        ({"precision": Precision()}, {"plugins": [DoublePrecision()]}),
        ({"precision": MixedPrecision("16-mixed")}, {"plugins": [MixedPrecision("16-mixed", init_scale=8)]}),
        ({"precision": MixedPrecision("bf16-mixed")}, {"precision": 32}),
        ({"precision": MixedPrecision("bf16-mixed")}, {"plugins": [MixedPrecision("16-mixed")]}),
        ({"checkpoint_io": AsyncCheckpointIO()}, {"plugins": [AsyncCheckpointIO(max_pending=1)]}),
        ({"checkpoint_io": TorchCheckpointIO()}, {"plugins": [AsyncCheckpointIO()]}),
    ],
)
def test_contradictions_of_the_strategy(tmp_path: Path, own: dict[str, Any], given: dict[str, Any]) -> None:
    """Where the Trainer's arguments contradict the strategy's own, neither wins in silence."""
    strategy = strategy_with(**own)
    own_and_given = {"strategy": strategy, "devices": "auto", **given}
    raises(ConfigurationError, "contradict each other", trainer, tmp_path, **own_and_given)
    assert not strategy.is_bound


def test_contradictions_of_a_strategys_name(tmp_path: Path) -> None:
    """The options in a name are the strategy's own; the error names the argument for a start method."""
    text, spawn = "devices=2 and the strategy's own devices=3 contradict", "ddp_spawn:devices=3"
    raises(ConfigurationError, text, trainer, tmp_path, strategy=spawn, devices=2)
    text, plugins = r"as DDPSpawnStrategy\(start_method='fork'\)", [DDPSpawnStrategy()]
    raises(ConfigurationError, text, trainer, tmp_path, strategy="ddp_fork", plugins=plugins)
    two = [torch.device("cpu")] * 2  # the arguments of one strategy do not contradict each other either
    for arguments in ({"devices": 3}, {"accelerator": "cuda"}):
        raises(ConfigurationError, "contradict", DDPSpawnStrategy, parallel_devices=two, **arguments)
    assert DDPSpawnStrategy(parallel_devices=two, devices=2).process_config.devices == 2


@pytest.mark.parametrize(
    ("own", "given", "size"),
    [
        ({}, {"devices": 3}, 3),
        ({}, {"devices": "3", "accelerator": "CPU"}, 3),
        ({"devices": [4, 7]}, {"devices": 2}, 2),
        ({"devices": 2}, {"devices": [4, 7]}, 2),
        ({"devices": "auto"}, {"devices": 2}, 2),
        ({"num_nodes": 1}, {"num_nodes": 1}, 3),
        ({"cluster_environment": "Local"}, {"plugins": ["local"]}, 3),
        ({"cluster_environment": "local"}, {"plugins": [LocalEnvironment()]}, 3),
        ({"cluster_environment": LocalEnvironment()}, {"plugins": ["LOCAL"]}, 3),
        ({"cluster_environment": LocalEnvironment()}, {"plugins": [LocalEnvironment()]}, 3),
        ({"precision": Precision()}, {"precision": 32}, 3),
        ({"precision": Precision()}, {"plugins": [Precision()]}, 3),
        ({"precision": MixedPrecision("16-mixed")}, {"plugins": [MixedPrecision("16-mixed")]}, 3),
        ({"checkpoint_io": TorchCheckpointIO()}, {"plugins": [TorchCheckpointIO()]}, 3),
        ({"checkpoint_io": AsyncCheckpointIO()}, {"plugins": [AsyncCheckpointIO()]}, 3),
    ],
)
def test_agreement_with_the_strategy(
    tmp_path: Path, own: dict[str, Any], given: dict[str, Any], size: int
) -> None:
    """What agrees is allowed in both places; indices of devices say more than their number."""
    train = trainer(tmp_path, **{"strategy": strategy_with(**own), "devices": "auto", **given})
    assert train.world_size == size
    assert agreed_value("devices", 2, [4, 7]) == agreed_value("devices", [4, 7], 2) == [4, 7]


def test_the_strategys_own_parts(tmp_path: Path) -> None:
    """A strategy that a Trainer has derived keeps its parts; an assigned part is the strategy's own too.

    A precision of the same name stays the strategy's, with its options; so does the same object.
    """
    first = trainer(tmp_path, strategy=strategy_with(), devices=3, precision="64-true").strategy
    assigned = strategy_with()
    assigned.precision = DoublePrecision()
    for strategy in (first, assigned):
        assert trainer(tmp_path, strategy=strategy, devices=3).strategy.precision.name == "64-true"
        options = {"strategy": strategy, "devices": 3, "precision": "16-mixed"}
        raises(ConfigurationError, "contradict each other", trainer, tmp_path, **options)
    derived = trainer(tmp_path, strategy=strategy_with().with_(grace_period_s=2), devices=3, precision=64)
    assert derived.strategy.precision.name == "64-true"
    files = AsyncCheckpointIO()
    strategy = strategy_with(precision=MixedPrecision("16-mixed", init_scale=8.0), checkpoint_io=files)
    assert trainer(tmp_path, strategy=strategy, devices=3, precision=16).strategy is strategy
    derived = trainer(tmp_path, strategy=strategy_with(checkpoint_io=files), devices=3, plugins=[files])
    assert derived.strategy.checkpoint_io is files


def test_default_callbacks_and_loggers(tmp_path: Path) -> None:
    """A progress bar, a checkpoint as the last callback and a CSV logger are there by default."""
    own = Callback()
    train = trainer(tmp_path, callbacks=[ModelCheckpoint(), own], enable_progress_bar=None)
    assert [type(callback) for callback in train.callbacks] == [Callback, TQDMProgressBar, ModelCheckpoint]
    for default in (True, None):
        train = trainer(tmp_path, enable_checkpointing=default, logger=default)
        assert [type(callback) for callback in train.callbacks] == [ModelCheckpoint]
        assert isinstance(train.logger, CSVLogger)
        assert train.log_dir == str(tmp_path / "rankwise_logs" / "version_0")
    assert trainer(tmp_path, logger=False).logger is None


def test_no_argument_is_assigned_without_effect(tmp_path: Path) -> None:
    """Each argument of the constructor, a keyword for editors, is an attribute, or its assignment raises.

    So does that of what the Trainer and its strategy determine.
    """
    train, parameters = trainer(tmp_path), inspect.signature(Trainer).parameters
    assert "max_epochs" in parameters
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert hasattr(Trainer, name) or name in vars(train), name
    for name in ("accelerator", "devices", "precision", "fast_dev_run", "sync_batchnorm", "max_time"):
        raises(AttributeError, name, setattr, train, name, 1)
    for name in ("current_epoch", "global_step", "world_size", "global_rank", "local_rank", "is_global_zero"):
        raises(AttributeError, name, setattr, train, name, 1)


@pytest.mark.parametrize("phase", ["train", "val", "test", "predict"])
def test_limits_can_be_set(tmp_path: Path, phase: str) -> None:
    """max_epochs, max_steps and limit_*_batches may be set later, and are checked then too."""
    train, name = trainer(tmp_path), f"limit_{phase}_batches"
    train.max_epochs, train.max_steps = 5, 10
    raises(InvalidArgumentError, "max_epochs=-3", setattr, train, "max_epochs", -3)
    setattr(train, name, 3)
    assert getattr(train, name) == getattr(train.options, name) == 3
    raises(InvalidArgumentError, f"{name}=1.5", setattr, train, name, 1.5)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_epoch", "max_epochs"),
        ("stategy", "strategy"),
        ("enable_progressbar", "enable_progress_bar"),
        ("acumulate_grad_batches", "accumulate_grad_batches"),
    ],
)
def test_a_misspelt_keyword(tmp_path: Path, name: str, meant: str) -> None:
    """The error suggests the nearest keyword and lists all; it is a TypeError, as Python's own."""
    with pytest.raises(UnknownArgumentError) as caught:
        trainer(tmp_path, **{name: 1})
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).startswith(f"Trainer takes no argument {name!r}. Did you mean {meant!r}?")
    assert "'limit_train_batches'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"gpus": 2}, 'Trainer(accelerator="gpu", devices=2).'),
        ({"num_processes": 3}, "Trainer(devices=3)."),
        ({"replace_sampler_ddp": False}, "Trainer(use_distributed_sampler=False)."),
        ({"resume_from_checkpoint": "a.ckpt"}, "trainer.fit(model, ckpt_path='a.ckpt')."),
        ({"amp_backend": "native"}, 'Trainer(precision="16-mixed"); for Apex O2: "16-master".'),
        ({"find_unused_parameters": True}, "Trainer(strategy=DDPStrategy(find_unused_parameters=True))."),
        ({"timeout": 60}, "Trainer(strategy=DDPStrategy(timeout=60))."),
        ({"check_collectives": True}, "Trainer(strategy=DDPStrategy(check_collectives=True))."),
    ],
)
def test_a_keyword_of_another_system(tmp_path: Path, options: dict[str, Any], remedy: str) -> None:
    """The error names the replacement, and suggests no similar keyword."""
    with pytest.raises(UnknownArgumentError) as caught:
        trainer(tmp_path, **options)
    assert str(caught.value).splitlines()[1].endswith(remedy)
    assert "Did you mean" not in str(caught.value)


def test_remedies_are_true() -> None:
    """The arguments that the table of replacements names exist."""
    known = set(inspect.signature(Trainer).parameters)
    for name, remedy in TRAINER_ARGUMENTS.items():
        text = remedy.format(value=None)
        assert name not in known
        for words in re.findall(r"Trainer\((.*?)\)(?:[.;,]|$)", text):
            outer = re.sub(r"\(.*\)|\[.*\]", "", words)
            assert set(re.findall(r"(\w+)=", outer)) <= known, name
        for cls in re.findall(r"(\w+)\(\w+=", text):
            owner = getattr(rankwise, cls, None) or getattr(rankwise.callbacks, cls)
            keywords = re.findall(rf"{cls}\((\w+)=", text)
            assert set(keywords) <= set(inspect.signature(owner).parameters), name


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"strategy": "dp"}, 'Trainer(strategy="ddp"): a process for each device'),
        ({"strategy": "ddp_cpu"}, 'Trainer(strategy="ddp", accelerator="cpu", devices=...).'),
        ({"strategy": "fsdp"}, "ZeroRedundancyOptimizer"),
        ({"strategy": "deepspeed_stage_2"}, "ZeroRedundancyOptimizer"),
        ({"accelerator": "ddp"}, 'a strategy is meant: Trainer(strategy="ddp").'),
    ],
)
def test_names_that_other_systems_have(tmp_path: Path, options: dict[str, Any], remedy: str) -> None:
    """For strategies and accelerators of other libraries the error names the nearest one."""
    raises(UnknownNameError, re.escape(remedy), trainer, tmp_path, **options)


def test_none_stands_for_the_default(tmp_path: Path) -> None:
    """None is Lightning's default of several options; it has the value of ours, also when it is assigned."""
    names = [f"limit_{phase}_batches" for phase in ("train", "val", "test", "predict")]
    names += ["val_check_interval", "gradient_clip_algorithm", "log_every_n_steps"]
    train, expected = trainer(tmp_path, **dict.fromkeys(names)), trainer(tmp_path)
    train.limit_val_batches = 3
    train.limit_val_batches = None  # type: ignore[assignment]  # as a program that is not checked may
    assert [getattr(train, name) for name in names] == [getattr(expected, name) for name in names]

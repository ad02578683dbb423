"""Methods of a user's classes that rankwise would never call, or cannot call, are refused by name."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Fabric, Trainer, TrainingModule
from rankwise.checkpoint import AsyncCheckpointIO, CheckpointIO
from rankwise.checks import is_of_this_package
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.environments import ClusterEnvironment, LocalEnvironment, SlurmEnvironment
from rankwise.errors import ConfigurationError
from rankwise.launchers import Launcher
from rankwise.loggers import CSVLogger, Logger
from rankwise.precision import MixedPrecision, Precision
from rankwise.profilers import Profiler
from rankwise.ranks import RankInfo
from rankwise.strategies import DDPStrategy, Strategy
from rankwise.strategies.placement import Placement
from tests.helpers.needs import need_installed

Give = Callable[[Any], Any]
"""Takes a user's class, and gives an instance of it to rankwise."""

BASES: Mapping[str, type] = {
    "strategy": Strategy,
    "precision": Precision,
    "environment": ClusterEnvironment,
    "checkpoint_io": CheckpointIO,
    "launcher": Launcher,
    "logger": Logger,
    "profiler": Profiler,
}


def with_methods(base: type, **methods: Any) -> Any:
    """Return a subclass of `base` with these methods, and with the abstract ones."""
    abstract: dict[str, Any] = {
        name: getattr(base, name) for name in getattr(base, "__abstractmethods__", ())
    }
    for name, value in abstract.items():
        abstract[name] = property(lambda self: False) if isinstance(value, property) else _anything
    return type("Users", (base,), {**abstract, **methods})


def _anything(self: Any, *args: Any, **options: Any) -> None:
    """Take any arguments."""


def _strategy(users: Any) -> object:
    return users()


def _as(argument: str) -> Give:
    """Return what gives an instance to a strategy."""
    return lambda users: DDPStrategy(**{argument: users()})


def _launcher(users: Any) -> object:
    return Placement(RankInfo(), (torch.device("cpu"),), LocalEnvironment(), users())


def _logger(users: Any) -> object:
    return Trainer(logger=[CSVLogger("logs"), users()])


def _assigned_logger(users: Any) -> object:
    """Give a logger to a Trainer that exists already; it is checked before the next stage."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.logger = users()
    module = type("Module", (TrainingModule,), {"predict_step": lambda self, batch: batch})()
    return trainer.predict(module, DataLoader(TensorDataset(torch.zeros(1))))


GIVEN: list[tuple[str, type, Give]] = [
    ("strategy", DDPStrategy, _strategy),
    ("strategy", Strategy, _strategy),
    ("precision", Precision, _as("precision")),
    ("precision", MixedPrecision, lambda users: Trainer(plugins=[users("bf16-mixed")])),
    ("environment", LocalEnvironment, lambda users: Trainer(plugins=[users()])),
    ("environment", SlurmEnvironment, _as("cluster_environment")),
    ("launcher", Launcher, _launcher),
    ("launcher", Launcher, _as("launcher")),
    ("logger", Logger, _logger),
    ("logger", CSVLogger, lambda users: Fabric(loggers=users("logs"))),
    ("profiler", Profiler, lambda users: Trainer(profiler=users())),
]


@pytest.mark.parametrize(("kind", "base", "give"), GIVEN)
def test_methods_that_are_never_called(kind: str, base: type, give: Give) -> None:
    """The error names the method, and what to write instead, where the object is constructed or given."""
    assert MISSING_HOOKS[kind]
    for name, remedy in MISSING_HOOKS[kind].items():
        with pytest.raises(ConfigurationError, match=rf"Users\.{name}\(\) would never be called") as caught:
            give(with_methods(base, **{name: _anything}))
        assert remedy in str(caught.value)


def test_properties_that_are_never_read() -> None:
    """A property is refused as a method is; an attribute with its name is the user's own."""
    own = with_methods(DDPStrategy, restore_checkpoint_after_setup=property(lambda self: True))
    with pytest.raises(ConfigurationError, match="restore_checkpoint_after_setup"):
        own()
    strategy = with_methods(DDPStrategy, setup=None, handles_gradient_accumulation=True)()
    assert strategy.handles_gradient_accumulation


def _in_lightnings_form(self: Any, tensor: Any, model: Any, optimizer: Any, *args: Any) -> None:
    """Has the arguments of Lightning's `Precision.backward`."""


ARGUMENTS: list[tuple[type, Give, str, Any, str]] = [
    (
        DDPStrategy,
        _strategy,
        "configure_ddp",
        lambda self, module: None,
        "(self, module, device_ids) -> Dist",
    ),
    (DDPStrategy, _strategy, "backward", lambda self, loss, optimizer: None, "backward(self, loss) -> None"),
    (Precision, _as("precision"), "backward", _in_lightnings_form, "def backward(self, loss) -> None"),
    (
        Precision,
        _as("precision"),
        "optimizer_step",
        lambda self, optimizer, model, closure, **options: None,
        "def optimizer_step(self, optimizer, closure)",
    ),
    (
        CheckpointIO,
        _as("checkpoint_io"),
        "save_checkpoint",
        lambda self, checkpoint, path, storage_options: None,
        "def save_checkpoint(self, checkpoint, path)",
    ),
    (
        CheckpointIO,
        lambda users: AsyncCheckpointIO(users()),
        "remove_checkpoint",
        lambda self: None,
        "def remove_checkpoint(self, path)",
    ),
    (Logger, _logger, "log_metrics", lambda self: None, "def log_metrics(self, metrics, step)"),
    (Logger, _assigned_logger, "log_metrics", lambda self: None, "def log_metrics(self, metrics, step)"),
]


@pytest.mark.parametrize(("base", "give", "name", "method", "remedy"), ARGUMENTS)
def test_other_arguments(base: type, give: Give, name: str, method: Any, remedy: str) -> None:
    """A method that cannot be called as rankwise calls it is refused, with the arguments that it gets."""
    with pytest.raises(ConfigurationError, match=rf"Users\.{name}\(\) cannot be called") as caught:
        give(with_methods(base, **{name: method}))
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("base", "give", "name"),
    [
        (DDPStrategy, _strategy, "distributed_sampler_kwargs"),
        (LocalEnvironment, _as("cluster_environment"), "world_size"),
        (Logger, _logger, "version"),
    ],
)
def test_a_method_in_place_of_a_property(base: type, give: Give, name: str) -> None:
    """It is refused: its value would be the method itself."""
    with pytest.raises(ConfigurationError, match=rf"Users\.{name} is a method") as caught:
        give(with_methods(base, **{name: lambda self, *args: 1}))
    assert f"@property above def {name}(self)" in str(caught.value)


class Mixin:
    """Has methods that the user's own code calls, and no base class of rankwise."""

    def reduce_all(self) -> None:
        """Do nothing."""

    def _prepare(self, model: object) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("kind", "base", "give"), GIVEN)
def test_methods_of_the_users_own(kind: str, base: type, give: Give) -> None:
    """Other names are the user's; an override may take more arguments than it gets, or all of them."""
    methods = dict.fromkeys(("setup_model", "log_text", "close_all"), _anything)
    give(type("Users", (Mixin, with_methods(base, **methods)), {}))
    if kind == "strategy":
        give(with_methods(base, broadcast=lambda self, obj, src=0, group=None: obj))


def _own_classes(base: type) -> Iterator[type]:
    """Return `base` and its subclasses in rankwise."""
    if is_of_this_package(base):
        yield base
        subclasses: list[type] = base.__subclasses__()
        for each in subclasses:
            yield from _own_classes(each)


@pytest.mark.parametrize("kind", BASES)
def test_methods_that_exist_are_not_refused(kind: str) -> None:
    """No class of rankwise has a method with a name of the table."""
    found = [
        (each.__name__, name)
        for each in _own_classes(BASES[kind])
        for name in MISSING_HOOKS[kind]
        if name in dir(each)
    ]
    assert found == []


# What programs read or call, and Lightning never calls in a subclass; and helpers of its own subclasses.
NO_OVERRIDES: Mapping[str, str] = {
    "strategy": "accelerator checkpoint_io is_distributed lightning_module model num_processes optimizers "
    "parallel_devices precision precision_plugin _convert_stateful_objects_in_state "
    "_err_msg_joint_setup_required _reset_optimizers_and_schedulers",
    "environment": "job_id job_name",
    "logger": "root_dir",
    "profiler": "local_rank",
}
LIGHTNINGS: list[tuple[str, str, str]] = [
    ("strategy", "lightning.pytorch.strategies", "DDPStrategy SingleDeviceStrategy"),
    ("strategy", "lightning.fabric.strategies", "DDPStrategy SingleDeviceStrategy"),
    ("precision", "lightning.pytorch.plugins", "Precision MixedPrecision HalfPrecision DoublePrecision"),
    ("precision", "lightning.fabric.plugins", "Precision MixedPrecision HalfPrecision DoublePrecision"),
    ("environment", "lightning.pytorch.plugins.environments", "ClusterEnvironment LightningEnvironment"),
    ("checkpoint_io", "lightning.pytorch.plugins", "CheckpointIO TorchCheckpointIO"),
    ("launcher", "lightning.pytorch.strategies.launchers", "_MultiProcessingLauncher"),
    ("launcher", "lightning.pytorch.strategies.launchers", "_SubprocessScriptLauncher"),
    ("logger", "lightning.pytorch.loggers", "Logger"),
    ("profiler", "lightning.pytorch.profilers", "Profiler SimpleProfiler"),
]


def _methods(kind: type) -> set[str]:
    """Return the names of methods and properties that Lightning defines for a class."""
    lightnings = [each for each in kind.__mro__ if each.__module__.startswith("lightning.")]
    return {
        name
        for each in lightnings
        for name, value in vars(each).items()
        if not name.startswith("__") and (inspect.isroutine(value) or isinstance(value, property))
    }


@pytest.mark.filterwarnings("ignore")  # what Lightning and its dependencies warn of
@pytest.mark.parametrize(("kind", "module", "names"), LIGHTNINGS)
def test_each_method_of_lightnings_is_known(
    kind: str, module: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exists here, is refused, or is no method that Lightning calls in a user's class."""
    need_installed("lightning")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # importing Lightning sets it
    theirs = importlib.import_module(module)
    base = DDPStrategy if kind == "strategy" else BASES[kind]
    known = {*dir(base), *MISSING_HOOKS[kind], *NO_OVERRIDES.get(kind, "").split()}
    methods = [_methods(getattr(theirs, name)) for name in names.split()]
    assert all(methods)
    assert sorted(set().union(*methods) - known) == []

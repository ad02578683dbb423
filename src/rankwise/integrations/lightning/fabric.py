"""Lightning's `Fabric` on processes of rankwise, and what the strategy for its `Trainer` shares with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NoReturn

from lightning.fabric.fabric import _do_nothing
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.pytorch import strategies as trainer_strategies
from torch import nn

from rankwise.environments import detect_environment
from rankwise.errors import ConfigurationError, InvalidTypeError, LaunchRefusedError, LifecycleError
from rankwise.gradient_sync.options import resolve_sync_mode
from rankwise.launchers import Launcher
from rankwise.launchers.multiprocess import MultiprocessLauncher
from rankwise.registry import StrategyRegistry
from rankwise.strategies import AutoStrategy, DDPElasticStrategy, DDPStrategy, Strategy
from rankwise.strategies.config import agreed_value, from_parallel_devices
from rankwise.strategies.open_job import begin_job

# rankwise detects these by the same variables, and by more: a batch job without srun has one process.
_DETECTED_HERE = (LSFEnvironment, SLURMEnvironment, TorchElasticEnvironment)
_REMEDY = "def main(fabric): ..., with all of the training, and fabric.launch(main)"


class JobEnvironment(ClusterEnvironment):
    """The ranks of a bound strategy. Setters do nothing: the strategy has determined the ranks."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning must not start any process: rankwise does."""
        return True

    @property
    def main_address(self) -> str:
        return self._endpoint[0]

    @property
    def main_port(self) -> int:
        return self._endpoint[1]

    @property
    def _endpoint(self) -> tuple[str, int]:
        address = self._strategy.worker.address
        if address is None:
            raise LifecycleError(
                call="cluster_environment.main_address",
                state="a private rendezvous",
                needed="a TCP store",
                remedy='strategy=RankwiseStrategy(rendezvous="tcp").',
            )
        return address

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._strategy.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._strategy.global_rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._strategy.local_rank

    def node_rank(self) -> int:
        return self._strategy.node_rank


class RankwiseLauncher(_Launcher):
    """Run Lightning's functions on every rank by `Strategy.launch`."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook: by a fork, or in processes that exist already."""
        launcher: Launcher = self._strategy.launcher
        if isinstance(launcher, MultiprocessLauncher):
            return launcher.start_method == "fork"
        return self._strategy.placement.environment.creates_processes_externally

    def kill(self, signum: int) -> None:
        """Do nothing: rankwise's supervisor passes signals on, and ends the processes that it has started."""


class OnRankwise:
    """A DDP strategy for Lightning's loops: rankwise starts and connects processes, and averages gradients.

    Args:
        strategy: a `rankwise.DDPStrategy`, or its name.
        checkpoint_io: Lightning's, as for its own strategies.
        arguments: of the strategy that is named, such as `start_method`, `timeout`, `comm_hook` and
            `find_unused_parameters`; and the precision plug-in, Lightning's, as for its own strategies.

    Attributes:
        rankwise: the strategy of rankwise.

    Raises:
        ConfigurationError: for options that cannot have an effect in Lightning's loops.
        RankwiseError: as the constructor of the named strategy.
    """

    precision_argument: ClassVar[str]  # the argument's name in Lightning's constructor
    launcher_type: ClassVar[type[RankwiseLauncher]]
    cluster_environment: Any  # Lightning sets these three
    parallel_devices: Any
    num_nodes: int

    def __init__(
        self, strategy: DDPStrategy | str = "ddp", *, checkpoint_io: Any = None, **arguments: Any
    ) -> None:
        name = self.precision_argument
        own: dict[str, Any] = {"checkpoint_io": checkpoint_io, name: arguments.pop(name, None)}
        self.rankwise = create_strategy(strategy, arguments)
        own |= {"timeout": self.rankwise.timeout, **self.rankwise.ddp_kwargs}
        super().__init__(**own)

    def bind_rankwise(self) -> None:
        """Determine the ranks from what Lightning has determined, with which the strategy must agree."""
        if not self.rankwise.is_bound:
            config = self.rankwise.process_config
            accelerator, devices = from_parallel_devices(self.parallel_devices)
            own, given = config.cluster_environment, environment_given(self.cluster_environment)
            self.rankwise.bind(
                accelerator=agreed_value("accelerator", config.accelerator, accelerator),
                devices=agreed_value("devices", config.devices, devices),
                num_nodes=agreed_value("num_nodes", config.num_nodes, self.num_nodes),
                environment=agreed_value("cluster_environment", own, given),
            )
        self.cluster_environment = JobEnvironment(self.rankwise)

    def check_in_job(self, remedy: str) -> None:
        """Raise `LifecycleError` where Lightning would create a process group without rankwise."""
        if not self.rankwise.is_in_job:
            raise LifecycleError(
                call="setup_environment()", state="not launched by rankwise", needed="a launch", remedy=remedy
            )

    def _configure_launcher(self) -> None:
        self._launcher = self.launcher_type(self.rankwise)


class FabricLauncher(RankwiseLauncher):
    """Run the function of `fabric.launch` on every rank; without one, the rest of the script."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` on every rank; return the value of this process's rank, or of rank 0.

        Raises:
            LaunchRefusedError: without a function, if the processes that start do not run the script.
        """
        strategy = self._strategy
        is_rest_of_script = isinstance(function, partial) and function.args[0] is _do_nothing
        if not is_rest_of_script:
            return strategy.launch(_run, function, args, kwargs)
        if not strategy.runs_in_caller:
            raise LaunchRefusedError(
                message="fabric.launch() needs the function that is to run in the processes that it starts.",
                facts=f"{type(strategy).__name__}, start_method={strategy.start_method!r}.",
                remedy=f'{_REMEDY}; or use strategy="rankwise_ddp" in a script, or torchrun.',
            )
        if not strategy.is_in_job:
            begin_job(strategy)
        return function(*args, **kwargs)


class RankwiseFabricStrategy(OnRankwise, FabricDDPStrategy):
    """Fabric's DDP strategy on rankwise. `OnRankwise` documents arguments, attributes and errors."""

    precision_argument = "precision"
    launcher_type = FabricLauncher

    def _set_world_ranks(self) -> None:
        self.bind_rankwise()

    def _setup_distributed(self) -> None:
        self.check_in_job(f"start the script with python or torchrun; {_REMEDY}.")
        self._process_group_backend = self.rankwise.process_group_backend

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module, as `DDPStrategy.setup_module` of rankwise."""
        return self.rankwise.setup_module(module)


def _run(_: DDPStrategy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def environment_given(environment: ClusterEnvironment) -> ClusterEnvironment | None:
    """Return the environment that the strategy gets; None where rankwise's own detection finds more.

    Lightning has one object for an environment that it has detected and for one that the user has given.
    """
    kind = type(environment)
    if kind is JobEnvironment or kind in _DETECTED_HERE:
        return None
    if kind is LightningEnvironment:  # given, if Lightning would have detected another
        return environment if any(other.detect() for other in _DETECTED_HERE) else None
    if kind is MPIEnvironment and detect_environment().environment.creates_processes_externally:
        return None
    return environment


def register_strategies(for_trainer: type, for_fabric: type) -> None:
    """Register each of rankwise's DDP strategies under its name after `rankwise_`; again is nothing."""
    registries: list[tuple[Any, Callable[..., Any]]]
    registries = [(trainer_strategies.StrategyRegistry, for_trainer), (STRATEGY_REGISTRY, for_fabric)]
    if (other := sys.modules.get("pytorch_lightning.strategies")) is not None:
        registries.append((other.StrategyRegistry, _refuse_other_package))
    for name in StrategyRegistry.available_strategies():
        entry = StrategyRegistry.entry(name)
        if _can_start_ranks(entry.strategy):
            for registry, strategy in registries:
                create, description = partial(strategy, name), f"rankwise: {entry.description}"
                registry.register(f"rankwise_{name}", create, description, override=True)


def _refuse_other_package(name: str) -> NoReturn:
    raise ConfigurationError(
        message=f'strategy="rankwise_{name}" does not work in the Trainer of pytorch_lightning.',
        facts="that package has classes of its own; rankwise's strategies derive from those of lightning.",
        remedy="import lightning.pytorch as pl.",
    )


def _can_start_ranks(strategy: type[Strategy]) -> bool:
    return issubclass(strategy, DDPStrategy) and not issubclass(strategy, (AutoStrategy, DDPElasticStrategy))


def create_strategy(given: DDPStrategy | str, arguments: dict[str, Any]) -> DDPStrategy:
    """Return a strategy that can start ranks for Lightning's loops, and has no options of rankwise's own.

    Raises:
        InvalidTypeError: for `"auto"`, an elastic strategy, or one that is not a `DDPStrategy`.
        ConfigurationError: for arguments of an existing strategy, or options that Lightning's loops ignore.
    """
    strategy = StrategyRegistry.create(given, **arguments) if isinstance(given, str) else given
    if not isinstance(strategy, DDPStrategy) or not _can_start_ranks(type(strategy)):
        raise InvalidTypeError(
            argument="strategy",
            value=given,
            expected="a DDPStrategy of rankwise, or its name",
            remedy='RankwiseStrategy("ddp"); for restarts start the script with torchrun --max-restarts.',
        )
    if not isinstance(given, str) and arguments:
        raise ConfigurationError(
            message=f"{', '.join(arguments)} cannot be added to a strategy that exists already.",
            facts=f"strategy={given!r}.",
            remedy=f"give them to {type(given).__name__}(...) itself.",
        )
    for option, (is_given, remedy) in _options_of_own_loops(strategy).items():
        if is_given:
            message = f"{option} cannot have an effect in Lightning's loops."
            raise ConfigurationError(message=message, remedy=remedy)
    return strategy.with_() if strategy.is_bound else strategy


def _options_of_own_loops(strategy: DDPStrategy) -> dict[str, tuple[bool, str]]:
    """Return for each option that has no effect here whether it is given, and the remedy."""
    gradients, own = strategy.gradients, "leave it out; it needs rankwise's Trainer."
    there = "give it to Lightning: Trainer("
    finds_unused = bool(strategy.ddp_kwargs.get("find_unused_parameters"))
    default_mode = resolve_sync_mode(finds_unused_parameters=finds_unused)
    return {
        "precision": ("precision" not in strategy.default_parts, f"{there}precision=...)."),
        "checkpoint_io": ("checkpoint_io" not in strategy.default_parts, f"{there}plugins=[...])."),
        "sync_batchnorm": (strategy.sync_batchnorm, f"{there}sync_batchnorm=True)."),
        "sync_mode": (gradients.mode is not default_mode, own),
        "gradient_weighting": (gradients.weighting is not None, own),
        "model_averaging_period": (gradients.period is not None, own),
    }

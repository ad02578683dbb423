"""Shared by the strategies for Lightning's `Trainer` and `Fabric`: rankwise's strategy, and its launcher."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies.launchers.launcher import _Launcher

from rankwise import strategies
from rankwise.environments import detect_environment
from rankwise.errors import LifecycleError
from rankwise.integrations.lightning.names import create_strategy
from rankwise.launchers import Launcher
from rankwise.launchers.multiprocess import MultiprocessLauncher
from rankwise.strategies.config import agreed_value, from_parallel_devices

# rankwise detects these by the same variables, and by more: a batch job without srun has one process.
_DETECTED_HERE = (LSFEnvironment, SLURMEnvironment, TorchElasticEnvironment)


class JobEnvironment(ClusterEnvironment):
    """The ranks of a bound strategy. Setters do nothing: the strategy has determined the ranks."""

    def __init__(self, strategy: strategies.DDPStrategy) -> None:
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

    def __init__(self, strategy: strategies.DDPStrategy) -> None:
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
        self, strategy: strategies.DDPStrategy | str = "ddp", *, checkpoint_io: Any = None, **arguments: Any
    ) -> None:
        name = self.precision_argument
        own: dict[str, Any] = {"checkpoint_io": checkpoint_io, name: arguments.pop(name, None)}
        self.rankwise = create_strategy(strategy, arguments)
        own |= {"timeout": self.rankwise.timeout, **self.rankwise.ddp_kwargs}
        super().__init__(**own)

    def bind_rankwise(self) -> None:
        """Determine the ranks from what Lightning has determined.

        Raises:
            ConfigurationError: where the strategy has other devices, nodes or environment of its own.
            RankwiseError: as `Strategy.bind`.
        """
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
                call="setup_environment()",
                state="not launched by rankwise",
                needed="a launch",
                remedy=remedy,
            )

    def _configure_launcher(self) -> None:
        self._launcher = self.launcher_type(self.rankwise)


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

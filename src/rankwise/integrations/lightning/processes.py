"""What Lightning's `Trainer` and `Fabric` share: binding a rankwise strategy, and launching through it."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.strategies.launchers.launcher import _Launcher

from rankwise.errors import LifecycleError
from rankwise.integrations.lightning.environment import JobEnvironment
from rankwise.launchers import Launcher
from rankwise.launchers.multiprocess import MultiprocessLauncher
from rankwise.strategies import DDPStrategy
from rankwise.strategies.config import agreed_value, from_parallel_devices

# Lightning finds these itself; rankwise's own detection then finds what it knows of the same launchers.
_DETECTED = (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)


def bind(strategy: DDPStrategy, devices: Any, num_nodes: int, environment: Any) -> ClusterEnvironment:
    """Bind `strategy` to what Lightning has determined; return the environment for Lightning.

    Raises:
        ConfigurationError: where the strategy has other devices, nodes, or another environment of its own.
        RankwiseError: as `Strategy.bind`.
    """
    if not strategy.is_bound:
        config = strategy.process_config
        accelerator, found = from_parallel_devices(devices)
        given = None if type(environment) in (*_DETECTED, JobEnvironment) else environment
        strategy.bind(
            accelerator=agreed_value("accelerator", config.accelerator, accelerator),
            devices=agreed_value("devices", config.devices, found),
            num_nodes=agreed_value("num_nodes", config.num_nodes, num_nodes),
            environment=given,
        )
    return JobEnvironment(strategy)


def check_in_job(strategy: DDPStrategy, remedy: str) -> None:
    """Raise `LifecycleError` where Lightning would create a process group without rankwise."""
    if not strategy.is_in_job:
        raise LifecycleError(
            call="setup_environment()", state="not launched by rankwise", needed="a launch", remedy=remedy
        )


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
        """Do nothing: rankwise's supervisor passes signals on, and ends what it has started."""

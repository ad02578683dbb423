"""Strategies for one process, and for DDP by start method: spawn, fork, elastic, or chosen automatically."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, final

from torch import nn
from torch.distributed import ProcessGroup

from rankwise.checks import check_value
from rankwise.environments import ClusterEnvironment
from rankwise.environments.network import listening_address
from rankwise.errors import ConfigurationError, LaunchRefusedError
from rankwise.gradient_sync import GradientSync
from rankwise.launchers import Launcher
from rankwise.launchers.script_place import can_rerun, script_place
from rankwise.process_group.collectives import ALONE, is_distributed
from rankwise.ranks import RankInfo
from rankwise.strategies.base import Strategy
from rankwise.strategies.config import RegisteredNames, ddp_names, refuse_keywords
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.placement import Placement, check_variables, inline_launcher, refuse_time_limit

_OF_ONE_PROCESS = ("accelerator", "devices", "num_nodes", "cluster_environment", "precision", "checkpoint_io")


class DDPSpawnStrategy(DDPStrategy):
    """`DDPStrategy` that spawns its processes."""

    registered_names: ClassVar[RegisteredNames] = ddp_names("ddp_spawn", "DDP; processes are spawned")
    default_start_method = "spawn"


class DDPForkStrategy(DDPStrategy):
    """`DDPStrategy` that forks its processes; works in notebooks."""

    registered_names: ClassVar[RegisteredNames] = {
        **ddp_names("ddp_fork", "DDP; processes are forked"),
        **ddp_names("ddp_notebook", "DDP; processes are forked, works in notebooks"),
    }
    default_start_method = "fork"


class DDPElasticStrategy(DDPStrategy):
    """`DDPStrategy` on torch's elastic agent: after a failure all ranks start again.

    The launched function then runs from its beginning; `Trainer.fit` continues from the last checkpoint that
    a `ModelCheckpoint` of the same run has written. The calling process is the agent. For a whole script use
    torchrun: `torchrun --max-restarts=3 train.py`, with strategy `"ddp"`.

    Args:
        max_restarts: after how many failures the ranks are started again.
        node_range: the number of nodes, or the smallest and largest number, as in `"1:4"`. Start the same
            program on each of them.
        endpoint: the rendezvous address of the nodes' agents: the first node's `"host:port"`.
        run_id: identifies the job; required with several nodes.

    The other arguments are `DDPStrategy`'s; `start_method` is `"spawn"`, `"fork"` or `"forkserver"`.

    Raises:
        InvalidArgumentError, ConfigurationError: for impossible values.
    """

    registered_names: ClassVar[RegisteredNames] = ddp_names(
        "ddp_elastic", "DDP; torch's elastic agent restarts processes that fail"
    )
    default_start_method: ClassVar[str] = "forkserver"

    def __init__(
        self,
        *,
        max_restarts: Any = 3,
        node_range: int | str = 1,
        endpoint: str = "",
        run_id: str = "",
        **arguments: Any,
    ) -> None:
        from rankwise.launchers.elastic import Nodes

        super().__init__(**arguments)
        if self.start_method == "popen":
            raise ConfigurationError(
                message="ddp_elastic runs a function, not the script again: not start_method='popen'.",
                remedy='"spawn", "fork" or "forkserver"; for a script: torchrun --max-restarts=3 train.py',
            )
        if self.rendezvous == "private":
            raise ConfigurationError(
                message="ddp_elastic cannot use a private rendezvous: torch's agent has a TCP store.",
                remedy='leave rendezvous at "auto"; on one node that store listens on loopback only.',
            )
        is_number = isinstance(max_restarts, int) and not isinstance(max_restarts, bool)
        check_value("max_restarts", max_restarts, is_number and max_restarts >= 0, "0 or more")
        fewest, most = _parse_node_range(node_range)
        if most > 1 and not (endpoint and run_id):
            raise ConfigurationError(
                message=f"node_range={node_range!r} needs an endpoint and a run_id.",
                remedy='DDPElasticStrategy(endpoint="first-node:29400", run_id="a name for the job", ...)',
            )
        self.max_restarts = max_restarts
        self._nodes = Nodes(fewest, most, endpoint, run_id, listening_address)

    def create_launcher(self, placement: Placement) -> Launcher:
        from rankwise.launchers.elastic import ElasticLauncher

        if placement.environment.creates_processes_externally:
            return super().create_launcher(placement)
        if (existing := script_place()) is not None:
            raise LaunchRefusedError(
                message="ddp_elastic cannot start processes: this script runs as "
                f"{existing.local_world_size} processes "
                'already, under strategy "ddp", and each of them would start ranks of its own.',
                remedy='use "ddp_spawn" or "ddp_fork" before it; for a script as a whole: '
                "torchrun --max-restarts=3 train.py",
            )
        check_variables(placement, self.group_config)
        refuse_time_limit(self.process_config)
        return ElasticLauncher(
            self.start_method,
            placement.ranks.local_world_size,
            self._nodes,
            max_restarts=self.max_restarts,
            grace_period_s=self.grace_period_s,
            init_timeout=self.init_timeout,
        )


def _parse_node_range(node_range: int | str) -> tuple[int, int]:
    words = str(node_range).split(":")
    numbers = [int(word) if word.isdecimal() else 0 for word in words]
    fewest, most = (numbers[0], numbers[-1]) if len(numbers) <= 2 else (0, 0)
    check_value("node_range", node_range, 1 <= fewest <= most, 'a number or "min:max"')
    return fewest, most


@final
class AutoStrategy(DDPStrategy):
    """One process if one is enough, DDP for several devices or processes.

    The script is run again if that leads to the same launch. If not, as in a notebook, in a shell or after a
    launch that failed, this process is forked.
    """

    registered_names: ClassVar[RegisteredNames] = {
        "auto": ("one process where one is enough, DDP otherwise", {})
    }

    @property
    def start_method(self) -> str:
        """The argument; once bound, the start method of the launcher."""
        launcher = self.placement.launcher if self.is_bound else None
        return getattr(launcher, "start_method", self.process_config.start_method)

    @start_method.setter
    def start_method(self, value: str) -> None:
        self.process_config = dataclasses.replace(self.process_config, start_method=value)

    def create_launcher(self, placement: Placement) -> Launcher:
        if self.process_config.launcher is None and placement.ranks.world_size == 1:
            refuse_time_limit(self.process_config)
            return inline_launcher(placement)
        if can_rerun():
            return super().create_launcher(placement)
        forking = copy.copy(self)
        forking.start_method = "fork"
        return DDPStrategy.create_launcher(forking, placement)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module if there are several ranks."""
        return super().setup_module(module) if self.world_size > 1 else Strategy.setup_module(self, module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing; with one rank they never do."""
        return super().no_backward_sync(module, enabled) if self.world_size > 1 else nullcontext()


@final
class SingleDeviceStrategy(Strategy):
    """Train in the calling process. Refused where an outer launcher has started several processes.

    With `cluster_environment="local"` each process trains by itself there, also within a job of another
    strategy: its trainer and its collectives do not use the process group.

    Args:
        gradient_weighting: how accumulated batches of different sizes are weighted; see `DDPStrategy`.
        arguments: `accelerator`, `devices`, `num_nodes`, `cluster_environment`, `precision` and
            `checkpoint_io`, as `Strategy`'s.
    """

    registered_names: ClassVar[RegisteredNames] = {"single_device": ("one process, one device", {})}

    def __init__(self, *, gradient_weighting: str | None = None, **arguments: Any) -> None:
        refuse_keywords(type(self), arguments.keys() - _OF_ONE_PROCESS)
        super().__init__(gradients=GradientSync(gradient_weighting=gradient_weighting), **arguments)

    def setup_environment(self) -> None:
        """Prepare this process, which is alone."""
        self._prepare_process()

    @property
    def job_group(self) -> ProcessGroup | None:
        """No group: this process alone, also if a process group exists."""
        return ALONE if is_distributed() else None

    data_parallel_group = job_group

    def place_ranks(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        for name, count in (("devices", local_world_size), ("num_nodes", num_nodes or environment.num_nodes)):
            expected, remedy = "1 with strategy 'single_device'", 'use strategy="ddp" to train on several.'
            check_value(name, count, count == 1, expected, remedy)
        return RankInfo()

    def create_launcher(self, placement: Placement) -> Launcher:
        world_size = placement.ranks.world_size
        expected = f"another: {placement.environment.name} has started {world_size} processes"
        remedy = (
            'use strategy="ddp", or start one process. To train in each process by itself: '
            'SingleDeviceStrategy(cluster_environment="local").'
        )
        check_value("strategy", "single_device", world_size == 1, expected, remedy)
        return inline_launcher(placement)

"""One process; and DDP whose processes are spawned, forked, or started in the best way for this process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn

from rankwise.environments import ClusterEnvironment
from rankwise.errors import InvalidArgumentError
from rankwise.gradient_sync import GradientSync
from rankwise.launchers import Launcher
from rankwise.launchers.script import can_rerun
from rankwise.ranks import RankInfo
from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.placement import Placement, inline_launcher


class DDPSpawnStrategy(DDPStrategy):
    """`DDPStrategy` that spawns its processes."""

    default_start_method = "spawn"


class DDPForkStrategy(DDPStrategy):
    """`DDPStrategy` that forks its processes; works in notebooks."""

    default_start_method = "fork"


@final
class AutoStrategy(DDPStrategy):
    """One process if one is enough, DDP for several devices or processes.

    The script is run again if that leads to the same launch. If not, as in a notebook, in a shell or after a
    launch that failed, this process is forked.
    """

    def _create_launcher(self, placement: Placement) -> Launcher:
        if placement.ranks.world_size == 1:
            return inline_launcher(placement)
        if not can_rerun():
            self.start_method = "fork"
        return super()._create_launcher(placement)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module if there are several ranks."""
        return super().setup_module(module) if self.world_size > 1 else Strategy.setup_module(self, module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing; with one rank they never do."""
        return super().no_backward_sync(module, enabled) if self.world_size > 1 else nullcontext()


@final
class SingleDeviceStrategy(Strategy):
    """Train in the calling process. Refused where an outer launcher has started several processes.

    Args:
        gradient_weighting: how accumulated batches of different sizes are weighted; see `DDPStrategy`.
        arguments: `Strategy`'s.
    """

    def __init__(self, *, gradient_weighting: str | None = None, **arguments: Any) -> None:
        super().__init__(gradients=GradientSync(gradient_weighting=gradient_weighting), **arguments)

    def _place_locally(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        for name, count in (("devices", local_world_size), ("num_nodes", num_nodes or environment.num_nodes)):
            if count != 1:
                raise InvalidArgumentError(
                    argument=name,
                    value=count,
                    expected="1 with strategy 'single_device'",
                    remedy='use strategy="ddp" to train on several.',
                )
        return RankInfo()

    def _create_launcher(self, placement: Placement) -> Launcher:
        world_size = placement.ranks.world_size
        if world_size != 1:
            raise InvalidArgumentError(
                argument="strategy",
                value="single_device",
                expected=f"another: {placement.environment.name} has started {world_size} processes",
                remedy='use strategy="ddp", or start one process.',
            )
        return inline_launcher(placement)

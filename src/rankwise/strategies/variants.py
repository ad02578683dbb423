"""DDP with other ways to start its processes: spawned, forked, or whatever is best here."""

from __future__ import annotations

from typing import final

from torch import nn

from rankwise.environments import ClusterEnvironment
from rankwise.launchers import Launcher
from rankwise.launchers.script import can_rerun
from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.placement import inline_launcher

__all__ = ["AutoStrategy", "DDPForkStrategy", "DDPSpawnStrategy"]


class DDPSpawnStrategy(DDPStrategy):
    """`DDPStrategy` that spawns its processes."""

    default_start_method = "spawn"


class DDPForkStrategy(DDPStrategy):
    """`DDPStrategy` that forks its processes; works in notebooks."""

    default_start_method = "fork"


@final
class AutoStrategy(DDPStrategy):
    """One process where one is enough, DDP where several devices or processes are there.

    The script is run again where that leads here; else, in a notebook or shell or after a launch that failed,
    this process is forked.
    """

    def _create_launcher(self, environment: ClusterEnvironment) -> Launcher:
        if self.world_size == 1:
            return inline_launcher(environment, self.ranks)
        if not can_rerun():
            self.start_method = "fork"
        return super()._create_launcher(environment)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module where there are several ranks."""
        if self.world_size > 1:
            return super().setup_module(module)
        self._plain_modules.add(module)
        return Strategy.setup_module(self, module)

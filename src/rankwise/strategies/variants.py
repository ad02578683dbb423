"""DDP with other ways to start its processes: spawned, forked, or the best one for this process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn

from rankwise.launchers import Launcher
from rankwise.launchers.script import can_rerun
from rankwise.strategies.base import Strategy
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.placement import Placement, inline_launcher

__all__ = ["AutoStrategy", "DDPForkStrategy", "DDPSpawnStrategy"]


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
        return super()._create_launcher(placement)

    def _choose_start_method(self) -> str:
        return self.start_method if can_rerun() else "fork"

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module if there are several ranks."""
        return super().setup_module(module) if self.world_size > 1 else Strategy.setup_module(self, module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing; with one rank they never do."""
        return super().no_backward_sync(module, enabled) if self.world_size > 1 else nullcontext()

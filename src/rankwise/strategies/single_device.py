"""`SingleDeviceStrategy`: one process, one device, nothing to synchronise."""

from __future__ import annotations

from typing import Any, final

from rankwise.environments import ClusterEnvironment
from rankwise.errors import InvalidArgumentError
from rankwise.launchers import Launcher
from rankwise.ranks import RankInfo
from rankwise.strategies.base import Strategy
from rankwise.strategies.config import GradientConfig
from rankwise.strategies.placement import Placement, inline_launcher

__all__ = ["SingleDeviceStrategy"]


@final
class SingleDeviceStrategy(Strategy):
    """Train in the calling process. Refused where an outer launcher has started several processes.

    Args:
        gradient_weighting: how accumulated batches of different sizes are weighted; see `DDPStrategy`.
        arguments: `Strategy`'s.
    """

    def __init__(self, *, gradient_weighting: str | None = None, **arguments: Any) -> None:
        super().__init__(gradient_config=GradientConfig(gradient_weighting=gradient_weighting), **arguments)

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

"""`SingleDeviceStrategy`: one process, one device, nothing to synchronise."""

from __future__ import annotations

from typing import Any, final

from rankwise.environments import ClusterEnvironment
from rankwise.errors import InvalidArgumentError
from rankwise.gradient_sync import GradientSync
from rankwise.launchers import Launcher
from rankwise.ranks import RankInfo
from rankwise.strategies.base import Strategy
from rankwise.strategies.placement import inline_launcher

__all__ = ["SingleDeviceStrategy"]


@final
class SingleDeviceStrategy(Strategy):
    """Train in the calling process. Under an outer launcher it is refused where that has started several.

    Args:
        gradient_weighting: how accumulated batches of different sizes count; see `DDPStrategy`.
        arguments: `Strategy`'s.
    """

    def __init__(self, *, gradient_weighting: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.gradients = GradientSync(gradient_weighting=gradient_weighting)

    def _place_locally(self, local_world_size: int, num_nodes: int | None) -> RankInfo:
        for name, count in (
            ("devices", local_world_size),
            ("num_nodes", num_nodes or self.environment.num_nodes),
        ):
            if count != 1:
                raise InvalidArgumentError(
                    argument=name,
                    value=count,
                    expected="1 with strategy 'single_device'",
                    remedy='use strategy="ddp" to train on several.',
                )
        return RankInfo()

    def _create_launcher(self, environment: ClusterEnvironment) -> Launcher:
        if self.world_size != 1:
            raise InvalidArgumentError(
                argument="strategy",
                value="single_device",
                expected=f"another: {environment.name} has started {self.world_size} processes",
                remedy='use strategy="ddp", or start one process.',
            )
        return inline_launcher(environment, self.ranks)

"""rankwise: DistributedDataParallel strategies for PyTorch. Public names are imported on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rankwise.start import CONTEXT_VARIABLE, lazy_names

if CONTEXT_VARIABLE in os.environ:  # a re-run script: connect to the main process before anything else
    from rankwise.launchers.worker_main import attach

    attach(os.environ.pop(CONTEXT_VARIABLE))

if TYPE_CHECKING:
    from rankwise import callbacks, errors
    from rankwise.callbacks import Callback
    from rankwise.environments import ClusterEnvironment
    from rankwise.errors import RankwiseError
    from rankwise.fabric import Fabric
    from rankwise.gradient_sync import GradientSyncMode, gradient_sync_context, register_ddp_comm_hook
    from rankwise.launchers import Launcher
    from rankwise.launchers.commands import CommandLauncher
    from rankwise.ranks import RankInfo, rank_zero_info, rank_zero_only, rank_zero_warn
    from rankwise.registry import StrategyRegistry
    from rankwise.seed import seed_everything
    from rankwise.strategies import (
        DDPElasticStrategy,
        DDPForkStrategy,
        DDPSpawnStrategy,
        DDPStrategy,
        SingleDeviceStrategy,
        Strategy,
    )
    from rankwise.trainer import DataModule, Trainer, TrainingModule

__version__ = "0.1.0"

_HOMES = {
    "rankwise.callbacks": "Callback callbacks",
    "rankwise.environments": "ClusterEnvironment",
    "rankwise.errors": "RankwiseError errors",
    "rankwise.fabric": "Fabric",
    "rankwise.gradient_sync": "GradientSyncMode gradient_sync_context register_ddp_comm_hook",
    "rankwise.launchers": "Launcher",
    "rankwise.launchers.commands": "CommandLauncher",
    "rankwise.ranks": "RankInfo rank_zero_info rank_zero_only rank_zero_warn",
    "rankwise.registry": "StrategyRegistry",
    "rankwise.seed": "seed_everything",
    "rankwise.strategies": "DDPElasticStrategy DDPForkStrategy DDPSpawnStrategy DDPStrategy "
    "SingleDeviceStrategy Strategy",
    "rankwise.trainer": "DataModule Trainer TrainingModule",
}

__all__ = [
    "Callback",
    "ClusterEnvironment",
    "CommandLauncher",
    "DDPElasticStrategy",
    "DDPForkStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DataModule",
    "Fabric",
    "GradientSyncMode",
    "Launcher",
    "RankInfo",
    "RankwiseError",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyRegistry",
    "Trainer",
    "TrainingModule",
    "callbacks",
    "errors",
    "gradient_sync_context",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "register_ddp_comm_hook",
    "seed_everything",
]


if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

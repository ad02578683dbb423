"""rankwise: DistributedDataParallel strategies for PyTorch. Public names are imported on first use."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.start import CONTEXT_VARIABLE

if CONTEXT_VARIABLE in os.environ:  # a re-run script: connect to the main process before anything else
    from rankwise.launchers.worker_main import attach

    attach(os.environ.pop(CONTEXT_VARIABLE))

if TYPE_CHECKING:
    from types import ModuleType

    from rankwise import callbacks, errors
    from rankwise.callbacks import Callback
    from rankwise.environments import ClusterEnvironment
    from rankwise.fabric import Fabric
    from rankwise.gradient_sync import GradientSyncMode, gradient_sync_context, register_ddp_comm_hook
    from rankwise.launchers import Launcher
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
    "Callback": "rankwise.callbacks",
    "ClusterEnvironment": "rankwise.environments",
    "DDPElasticStrategy": "rankwise.strategies",
    "DDPForkStrategy": "rankwise.strategies",
    "DDPSpawnStrategy": "rankwise.strategies",
    "DDPStrategy": "rankwise.strategies",
    "DataModule": "rankwise.trainer",
    "Fabric": "rankwise.fabric",
    "GradientSyncMode": "rankwise.gradient_sync",
    "Launcher": "rankwise.launchers",
    "RankInfo": "rankwise.ranks",
    "SingleDeviceStrategy": "rankwise.strategies",
    "Strategy": "rankwise.strategies",
    "StrategyRegistry": "rankwise.registry",
    "Trainer": "rankwise.trainer",
    "TrainingModule": "rankwise.trainer",
    "gradient_sync_context": "rankwise.gradient_sync",
    "rank_zero_info": "rankwise.ranks",
    "rank_zero_only": "rankwise.ranks",
    "rank_zero_warn": "rankwise.ranks",
    "register_ddp_comm_hook": "rankwise.gradient_sync",
    "seed_everything": "rankwise.seed",
}
_MODULES = ("callbacks", "errors")

__all__ = [
    "Callback",
    "ClusterEnvironment",
    "DDPElasticStrategy",
    "DDPForkStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DataModule",
    "Fabric",
    "GradientSyncMode",
    "Launcher",
    "RankInfo",
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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _import(f"rankwise.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rankwise' has no attribute {name!r}")
    value = getattr(_import(_HOMES[name]), name)
    globals()[name] = value
    return value


def _import(name: str) -> ModuleType:
    """Import a module; without garbage collections meanwhile, each of which walks all of torch's objects."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if is_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

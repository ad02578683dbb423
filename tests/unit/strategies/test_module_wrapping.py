"""SyncBatchNorm: where it is refused, and that what training made of it is kept when it is turned back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankwise import DDPStrategy, Trainer
from rankwise.errors import ConfigurationError
from rankwise.strategies.module_wrapping import WrappedModules


def test_there_and_back() -> None:
    """Layers are replaced at any depth and come back the same objects, with the state of now."""
    layer = nn.BatchNorm2d(3, momentum=0.3)
    module: Any = nn.Sequential(nn.Sequential(layer), nn.BatchNorm1d(3), nn.Linear(3, 3))
    weight = layer.weight
    modules = WrappedModules()
    modules.sync_batchnorms(module, None)
    assert [type(child) for child in (module[0][0], module[1])] == [nn.SyncBatchNorm] * 2
    assert module[0][0].weight is weight
    module.double()  # replaces buffers, as moving to a device does
    module[0][0].running_mean.add_(1)
    module[0][0].track_running_stats = False  # frozen
    module.eval()
    modules.restore_batchnorms()
    assert module[0][0] is layer
    assert layer.weight is weight
    assert not layer.training
    assert not layer.track_running_stats
    assert layer.running_mean is not None
    assert torch.equal(layer.running_mean, torch.ones(3, dtype=torch.double))
    assert [type(child) for child in module] == [nn.Sequential, nn.BatchNorm1d, nn.Linear]


def test_what_is_synchronised_already_stays() -> None:
    """A user's own SyncBatchNorm is not turned into another layer."""
    layer = nn.SyncBatchNorm(2)
    module = nn.Sequential(layer)
    modules = WrappedModules()
    modules.sync_batchnorms(module, None)
    modules.restore_batchnorms()
    assert module[0] is layer


def test_refused_on_the_cpu() -> None:
    """There is none on the CPU, which is said before any process starts."""
    with pytest.raises(ConfigurationError, match="SyncBatchNorm"):
        DDPStrategy(sync_batchnorm=True, accelerator="cpu", devices=2).bind()
    with pytest.raises(ConfigurationError, match="SyncBatchNorm"):
        Trainer(strategy="ddp_fork", accelerator="cpu", devices=2, sync_batchnorm=True)


def test_one_process_needs_none() -> None:
    """With one process there is nobody to synchronise with, on the CPU either."""
    assert Trainer(strategy="ddp_fork", accelerator="cpu", devices=1, sync_batchnorm=True).world_size == 1

"""SyncBatchNorm, where it is refused and what is kept of it; modules that end before their job."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from rankwise import DDPStrategy, Trainer
from rankwise.errors import ConfigurationError
from rankwise.strategies.module_wrapping import WrappedModules, compile_within, uncompiled
from tests.helpers.raising import raises
from tests.helpers.threaded import ThreadedStrategy
from tests.unit.gradient_sync.helpers import net, on_ranks


def test_missing_weights_are_an_error() -> None:
    """By default a state that is loaded has all of a module."""
    raises(RuntimeError, "Missing key", DDPStrategy().load_module_state_dict, nn.Linear(1, 1), {})


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
    """It is not turned into another layer; a layer that is the root has no owner, and is refused."""
    layer = nn.SyncBatchNorm(2)
    module = nn.Sequential(layer)
    modules = WrappedModules()
    modules.sync_batchnorms(module, None)
    modules.restore_batchnorms()
    assert module[0] is layer
    with pytest.raises(ConfigurationError, match=r"wrap it: nn\.Sequential\(BatchNorm1d"):
        WrappedModules().sync_batchnorms(nn.BatchNorm1d(2), None)
    WrappedModules().sync_batchnorms(nn.SyncBatchNorm(2), None)


def test_refused_on_the_cpu() -> None:
    """There is none on the CPU, which is said before any process starts; one process needs none."""
    with pytest.raises(ConfigurationError, match="SyncBatchNorm"):
        DDPStrategy(sync_batchnorm=True, accelerator="cpu", devices=2).bind()
    with pytest.raises(ConfigurationError, match="SyncBatchNorm"):
        Trainer(strategy="ddp_fork", accelerator="cpu", devices=2, sync_batchnorm=True)
    assert Trainer(strategy="ddp_fork", accelerator="cpu", devices=1, sync_batchnorm=True).world_size == 1


def test_modules_end_before_their_job() -> None:
    """A job keeps no module that it has prepared: it may prepare many, one after the other."""
    modules = WrappedModules()
    module = nn.Sequential(nn.BatchNorm1d(3))
    modules.sync_batchnorms(module, None)
    compiled: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    inner = uncompiled(compiled)
    undo = compile_within(inner, compiled)
    gone = [weakref.ref(each) for each in (module, inner)]
    del module, compiled, inner
    gc.collect()
    assert [each() for each in gone] == [None, None]
    undo()
    modules.restore_batchnorms()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_weighting": "logged"}])
def test_wrappers_end_before_their_job(options: dict[str, Any]) -> None:
    """A job keeps no wrapper either."""
    forward = threading.Lock()

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> Any:
        other = strategy.setup_module(nn.Linear(1, 1))
        with strategy.gradient_sync_context(other):
            # Torch keeps the active wrapper in a variable of the class, and each puts back the last one.
            with forward:
                loss = other(torch.ones(1, 1)).sum()
            (strategy.weighted_loss(loss, 1) if "gradient_weighting" in options else loss).backward()
        gone = weakref.ref(other)
        del other, loss
        deadline_s = time.monotonic() + 10  # a collection that begins during another thread's does nothing
        while gone() is not None and time.monotonic() < deadline_s:
            gc.collect()
        return gone()

    assert on_ranks(2, train, net(), **options) == [None, None]

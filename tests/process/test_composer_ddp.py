"""The counterparts of Composer's `trainer.ddp` on two processes: sync modes, their context, wrapping."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rankwise.gradient_sync import GradientSyncMode, gradient_sync_context, register_ddp_comm_hook
from rankwise.process_group.interception import Call, intercepted
from rankwise.strategies import DDPStrategy

MODES = [mode.value for mode in GradientSyncMode]
WINDOW = 3
SAMPLES = torch.linspace(-1, 1, 2 * WINDOW * 4, dtype=torch.float64).view(2, WINDOW, 4, 1)
"""Four samples for each microbatch of each rank."""


class Heads(nn.Module):
    """Has a layer for both ranks, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.both = nn.Linear(1, 3).double()
        self.heads = nn.ModuleList(nn.Linear(3, 1).double() for _ in range(2))

    def forward(self, samples: Tensor, head: int) -> Tensor:
        loss: Tensor = self.heads[head](torch.tanh(self.both(samples))).square().mean()
        return loss


@pytest.mark.distributed
@pytest.mark.quick
@pytest.mark.parametrize(("mode", "reductions"), [*zip(MODES, (1, WINDOW, 1), strict=True)])
def test_ddp_sync_context(mode: str, reductions: int, rank_strategy: DDPStrategy) -> None:
    """`_ddp_sync_context`: under each mode, named in any case, gradients are one process's."""
    assert DDPStrategy(sync_mode=mode.upper()).gradients.mode is GradientSyncMode(mode)
    single, calls = Heads(), list[Call]()
    for rank in range(2):
        for samples in SAMPLES[rank]:
            (single(samples, rank) / (2 * WINDOW)).backward()
    wrapped = DistributedDataParallel(Heads(), find_unused_parameters=True)
    register_ddp_comm_hook(wrapped, None, allreduce_hook)
    with intercepted(calls.append):
        for number, samples in enumerate(SAMPLES[rank_strategy.global_rank]):
            with gradient_sync_context(wrapped, (), number == WINDOW - 1, mode):
                (wrapped(samples, rank_strategy.global_rank) / WINDOW).backward()
    assert len(calls) == reductions
    found, expected = ([each.grad for each in module.parameters()] for module in (wrapped, single))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.distributed
def test_forced_sync_reduces_nothing_after_an_error(rank_strategy: DDPStrategy) -> None:
    """After a backward pass that raised, each rank has its own gradients, and no rank waits."""
    module = nn.Linear(1, 1)
    module.weight.grad = torch.full((1, 1), float(rank_strategy.global_rank))
    with pytest.raises(KeyError), gradient_sync_context(module, mode="forced_sync"):
        raise KeyError
    assert module.weight.grad.item() == rank_strategy.global_rank


@pytest.mark.distributed
@pytest.mark.quick
def test_prepare_ddp_module(rank_strategy: DDPStrategy) -> None:
    """`_prepare_ddp_module`: a plain module where nothing is trainable, else a wrapper."""
    rank_strategy.ddp_kwargs = {"find_unused_parameters": True}
    assert type(rank_strategy.setup_module(Heads().requires_grad_(False))) is Heads
    wrapped: Any = rank_strategy.setup_module(Heads())
    assert wrapped.find_unused_parameters

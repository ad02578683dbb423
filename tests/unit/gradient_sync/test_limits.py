"""What N ranks do not compute as one process does: see the table in docs/exactness.md."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.threaded import ThreadedStrategy
from tests.unit.gradient_sync.helpers import (
    FEATURES,
    accumulate,
    alone,
    assert_close,
    batch,
    gradients,
    loss_of,
    net,
    on_ranks,
)


def test_batch_normalisation_uses_each_ranks_batch() -> None:
    """Without `sync_batchnorm` the gradients are the mean of those of the ranks' own batches."""
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), net()).double()
    by_rank = [alone(model, [batch(rank, size=4)]) for rank in range(2)]
    means = [None if a is None or b is None else (a + b) / 2 for a, b in zip(*by_rank, strict=True)]
    for result in on_ranks(2, lambda s, m: accumulate(s, m, (4,)), model):
        assert_close(result, means)
        with pytest.raises(AssertionError):
            assert_close(result, alone(model, [batch(rank, size=4) for rank in range(2)]), 1e-3)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")  # new in torch 2.13
@pytest.mark.parametrize("is_shared", [True, False])
def test_buffers_that_ddp_does_not_broadcast(is_shared: bool) -> None:
    """With `broadcast_buffers=False` each rank has the running statistics of its own batches."""

    def two_batches(strategy: ThreadedStrategy, wrapped: nn.Module) -> Tensor:
        for number in range(2):
            with strategy.gradient_sync_context(wrapped):
                loss_of(wrapped, batch(strategy.global_rank, number)).backward()
        return strategy.unwrap_module(wrapped).get_buffer("0.running_mean")

    model = nn.Sequential(nn.BatchNorm1d(FEATURES), net()).double()
    for rank, found in enumerate(on_ranks(2, two_batches, model, broadcast_buffers=is_shared)):
        single = copy.deepcopy(model)
        for number in range(2):
            single(batch(0 if is_shared and number == 0 else rank, number))
        torch.testing.assert_close(found, single.get_buffer("0.running_mean"), rtol=0, atol=1e-12)


def test_a_loss_that_is_a_sum() -> None:
    """Averaged over N ranks, gradients of sums are one N-th of one process's."""
    model = net()
    single = copy.deepcopy(model)
    (loss_of(single, torch.cat([batch(rank) for rank in range(2)])) * 4).backward()
    for result in on_ranks(2, lambda s, m: accumulate(s, m, (2,), scale=2), model):  # of two samples
        assert_close([None if each is None else each * 2 for each in result], gradients(single))

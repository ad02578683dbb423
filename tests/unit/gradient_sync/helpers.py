"""Small models in float64, on ranks that are threads, and the results of one process on the same data."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.threaded import ThreadedStrategy, run_ranks

FEATURES = 3
_drawing = threading.Lock()


def net(seed: int = 0) -> nn.Module:
    """Return a model of four parameters."""
    with _drawing:  # ranks may be threads, which have one generator
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(rank: int, number: int = 0, size: int = 2) -> Tensor:
    """Return the same random samples every time."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    """Return a mean over samples."""
    loss: Tensor = (model(samples) - samples.sum(dim=1, keepdim=True)).square().mean()
    return loss


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return copies of a model's gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def on_ranks(
    world_size: int, work: Callable[[ThreadedStrategy, nn.Module], Any], model: nn.Module, **arguments: Any
) -> list[Any]:
    """Run `work(strategy, wrapped model)` on every rank, each with its own copy of the model."""
    copies = [copy.deepcopy(model) for _ in range(world_size)]

    def run(rank: int) -> Any:
        strategy = ThreadedStrategy(rank, world_size, **arguments)
        return strategy.launch(lambda s: work(s, s.setup_module(copies[rank])))

    return run_ranks(world_size, run)


def accumulate(
    strategy: ThreadedStrategy, wrapped: nn.Module, sizes: Sequence[int] = (2, 2), weighted: bool = False
) -> list[Tensor | None]:
    """Accumulate the gradients of a window of microbatches of these sizes; return them."""
    for number, size in enumerate(sizes):
        samples = batch(strategy.global_rank, number, size)
        with strategy.gradient_sync_context(wrapped, is_final_microbatch=number == len(sizes) - 1):
            loss = loss_of(wrapped, samples)
            loss = strategy.weighted_loss(loss, size) if weighted else loss / len(sizes)
            loss.backward()
    return gradients(strategy.unwrap_module(wrapped))


def alone(model: nn.Module, samples: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of one process on all samples at once."""
    single = copy.deepcopy(model)
    loss_of(single, torch.cat(list(samples))).backward()
    return gradients(single)


def bare(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model with torch alone."""
    return DistributedDataParallel(model)


def assert_close(left: Sequence[Tensor | None], right: Sequence[Tensor | None], atol: float = 1e-12) -> None:
    """Compare gradients, missing ones included."""
    assert [tensor is None for tensor in left] == [tensor is None for tensor in right]
    for mine, theirs in zip(left, right, strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)

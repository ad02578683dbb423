"""Logged weights where one loop trains several wrapped modules, at once or in turn."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError
from tests.helpers.threaded import ThreadedStrategy
from tests.unit.gradient_sync.helpers import assert_close, batch, gradients, loss_of, net, on_ranks

SIZES = ((4, 1), (3, 2), (0, 5))  # of each rank's two microbatches
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"sync_mode": "multi_auto_sync"},
    {"sync_mode": "forced_sync"},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.0001},
)


class Pair(nn.Module):
    """Two modules, of which the second reads what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3).double()
        self.second = net()

    def loss(self, samples: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
        """Return the mean error of the second module after the first."""
        target = samples.sum(dim=1, keepdim=True)
        return nn.functional.mse_loss(second(first(samples)), target)


def pair() -> Pair:
    torch.manual_seed(3)
    return Pair()


def both_gradients(first: nn.Module, second: nn.Module) -> list[Tensor | None]:
    return gradients(first) + gradients(second)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_loss_through_both(options: dict[str, Any]) -> None:
    """The weight of a loss counts for both modules: the gradients are those of one process."""
    model = pair()
    everything = [batch(rank, n, size) for rank in range(3) for n, size in enumerate(SIZES[rank]) if size]
    single = copy.deepcopy(model)
    single.loss(torch.cat(everything), single.first, single.second).backward()
    expected = both_gradients(single.first, single.second)

    def train(strategy: ThreadedStrategy, first: nn.Module) -> list[Tensor | None]:
        second = strategy.setup_module(copy.deepcopy(model.second))
        for _ in range(2):  # the second time in rebuilt buckets
            first.zero_grad()
            second.zero_grad()
            for number, size in enumerate(SIZES[strategy.global_rank]):
                block = strategy.gradient_sync_context
                with block(first, (), number == 1), block(second, (), number == 1):
                    loss = model.loss(batch(strategy.global_rank, number, max(1, size)), first, second)
                    strategy.backward(strategy.weighted_loss(loss, size))
        return both_gradients(strategy.unwrap_module(first), strategy.unwrap_module(second))

    for result in on_ranks(3, train, model.first, gradient_weighting="logged", **options):
        assert_close(result, expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_windows_in_turn(options: dict[str, Any]) -> None:
    """Microbatches of two modules alternate, with other weights for each: each module has its own window."""
    model = net()
    sizes = {0: SIZES, 1: tuple((b + 1, a) for a, b in SIZES)}
    expected = []
    for which in range(2):
        single = copy.deepcopy(model)
        everything = [batch(r, n, s) for r in range(3) for n, s in enumerate(sizes[which][r]) if s]
        loss_of(single, torch.cat(everything)).backward()
        expected.append(gradients(single))

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[list[Tensor | None]]:
        modules = [wrapped, strategy.setup_module(copy.deepcopy(model))]
        for _ in range(2):
            for module in modules:
                module.zero_grad()
            for number in range(2):
                for which, module in enumerate(modules):
                    size = sizes[which][strategy.global_rank][number]
                    with strategy.gradient_sync_context(module, (), number == 1):
                        loss = loss_of(module, batch(strategy.global_rank, number, max(1, size)))
                        strategy.backward(strategy.weighted_loss(loss, size))
        return [gradients(strategy.unwrap_module(module)) for module in modules]

    for results in on_ranks(3, train, model, gradient_weighting="logged", **options):
        for result, wanted in zip(results, expected, strict=True):
            assert_close(result, wanted)


@pytest.mark.parametrize("hook", ["fp16_compress", "bf16_compress"])
def test_units_are_those_of_both(hook: str) -> None:
    """Where weights are counted in units, a loss through both modules has one unit, which follows them."""
    model = pair()

    def train(strategy: ThreadedStrategy, first: nn.Module) -> list[list[Tensor | None]]:
        second, seen = strategy.setup_module(copy.deepcopy(model.second)), []
        for step in range(3):
            first.zero_grad()
            second.zero_grad()
            size = (100_001, 300_003)[strategy.global_rank] * 10**step
            with strategy.gradient_sync_context(first), strategy.gradient_sync_context(second):
                loss = model.loss(batch(strategy.global_rank, 0, 1), first, second)
                strategy.backward(strategy.weighted_loss(loss, size))
            seen.append(both_gradients(strategy.unwrap_module(first), strategy.unwrap_module(second)))
        return seen

    single = copy.deepcopy(model)
    for rank, share in enumerate((100_001 / 400_004, 300_003 / 400_004)):
        (single.loss(batch(rank, 0, 1), single.first, single.second) * share).backward()
    expected = both_gradients(single.first, single.second)
    for seen in on_ranks(2, train, model.first, gradient_weighting="logged", comm_hook=hook):
        for result in seen:
            assert_close(result, expected, atol=2e-2 if hook == "bf16_compress" else 5e-3)


def test_a_weight_outside_of_every_block() -> None:
    """It is refused, since no window would count it."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        with strategy.no_backward_sync(wrapped):
            strategy.backward(strategy.weighted_loss(loss_of(wrapped, batch(0)), 1))

    with pytest.raises(ConfigurationError, match="outside of the block"):
        on_ranks(1, train, net(), gradient_weighting="logged")

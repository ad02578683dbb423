"""Logged weights where one loop trains several wrapped modules, at once or in turn."""

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError
from tests.helpers.threaded import ThreadedStrategy
from tests.unit.gradient_sync.helpers import (
    SIZES,
    alone,
    assert_each,
    batch,
    batches_of,
    gradients,
    loss_of,
    net,
    on_ranks,
)

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"sync_mode": "multi_auto_sync"},
    {"sync_mode": "forced_sync"},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.0001},
)


def pair() -> nn.Sequential:
    """Return two modules, of which the second reads what the first gives."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 3).double(), net())


def all_wrapped(strategy: ThreadedStrategy, first: nn.Module, model: nn.Sequential) -> nn.Sequential:
    """Return a wrapped module, and its wrapped successors in the model."""
    return nn.Sequential(first, *(strategy.setup_module(copy.deepcopy(each)) for each in [*model][1:]))


def backward(
    strategy: ThreadedStrategy, wrapped: nn.Sequential, samples: Tensor, weight: int, is_final: bool = True
) -> None:
    """Run a backward pass through several modules, in a block of each."""
    with ExitStack() as blocks:
        for each in wrapped:
            blocks.enter_context(strategy.gradient_sync_context(each, (), is_final))
        strategy.backward(strategy.weighted_loss(loss_of(wrapped, samples), weight))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_loss_through_both(options: dict[str, Any]) -> None:
    """The weight of a loss counts for both modules: the gradients are those of one process."""
    model = pair()

    def train(strategy: ThreadedStrategy, first: nn.Module) -> list[Tensor | None]:
        both = all_wrapped(strategy, first, model)
        for _ in range(2):  # the second time in rebuilt buckets
            both.zero_grad()
            for number, size in enumerate(SIZES[strategy.global_rank]):
                samples = batch(strategy.global_rank, number, max(1, size))
                backward(strategy, both, samples, size, number == 1)
        return gradients(both)

    found = on_ranks(3, train, model[0], gradient_weighting="logged", **options)
    assert_each(found, alone(model, batches_of(SIZES)))


@pytest.mark.parametrize("options", OPTIONS)
def test_windows_in_turn(options: dict[str, Any]) -> None:
    """Microbatches of two modules alternate, with other weights for each: each module has its own window."""
    model = net()
    sizes = SIZES, tuple((b + 1, a) for a, b in SIZES)

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[Tensor | None]:
        modules = all_wrapped(strategy, wrapped, nn.Sequential(model, model))
        for _ in range(2):
            modules.zero_grad()
            for number in range(2):
                for which, module in enumerate(modules):
                    size = sizes[which][strategy.global_rank][number]
                    samples = batch(strategy.global_rank, number, max(1, size))
                    backward(strategy, nn.Sequential(module), samples, size, number == 1)
        return gradients(modules)

    expected = [gradient for each in sizes for gradient in alone(model, batches_of(each))]
    assert_each(on_ranks(3, train, model, gradient_weighting="logged", **options), expected)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *(
            (nn.Sequential(net()), {"comm_hook": hook, "comm_wrapper": wrapper, "bucket_cap_mb": 0.0001})
            for hook, wrapper in (
                *(("fp16_compress", None), ("allreduce", "fp16")),
                *(("bf16_compress", "bf16"), ("allreduce", None)),
            )
        ),
        *((pair(), {"comm_hook": hook}) for hook in ("fp16_compress", "bf16_compress")),
    ],
)
def test_compressed_with_weights(model: nn.Sequential, options: dict[str, Any]) -> None:
    """Weights too large for 16 bits are sent in full precision, divided by a unit that follows them.

    A loss through two modules has one unit.
    """
    sizes = (100_001, 300_003)

    def train(strategy: ThreadedStrategy, first: nn.Module) -> list[list[Tensor | None]]:
        wrapped, seen = all_wrapped(strategy, first, model), []
        for step in range(3):
            wrapped.zero_grad()
            rank = strategy.global_rank
            backward(strategy, wrapped, batch(rank, 0, 1), sizes[rank] * 10**step)
            seen.append(gradients(wrapped))
        return seen

    single = copy.deepcopy(model)
    for rank, size in enumerate(sizes):
        (loss_of(single, batch(rank, 0, 1)) * (size / sum(sizes))).backward()
    is_coarse = options["comm_hook"] == "bf16_compress"
    for seen in on_ranks(2, train, model[0], gradient_weighting="logged", **options):
        assert_each(seen, gradients(single), atol=2e-2 if is_coarse else 5e-3)


def test_a_weight_outside_of_every_block() -> None:
    """It is refused, since no window would count it."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        with strategy.no_backward_sync(wrapped):
            strategy.backward(strategy.weighted_loss(loss_of(wrapped, batch(0)), 1))

    with pytest.raises(ConfigurationError, match="outside of the block"):
        on_ranks(1, train, net(), gradient_weighting="logged")

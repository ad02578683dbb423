"""Accumulation windows whose number of batches is known late: data without a length ends within them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from rankwise import TrainingModule
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import batch, loss_of, net

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"sync_mode": "multi_auto_sync"},
    {"sync_mode": "forced_sync"},
    {"gradient_weighting": "logged"},
)


class Stream(IterableDataset[Tensor]):
    """Has `count` batches of one rank, and does not say how many."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (batch(self.rank, number) for number in range(self.count))


class Fit(TrainingModule):
    """Fits sums with momentum, so that a step of another size changes all later ones."""

    def __init__(self, *, is_logging: bool = False) -> None:
        super().__init__()
        self.net = net()
        self.is_logging = is_logging

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_logging:
            self.log_weight(1)
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def fitted(counts: tuple[int, ...], accumulate: int, policy: str, **options: Any) -> list[Tensor]:
    """Fit two epochs on threads; return each rank's weights."""
    modules = [Fit(is_logging="gradient_weighting" in options) for _ in counts]

    def fit(rank: int) -> Tensor:
        strategy = ThreadedStrategy(rank, len(counts), **options)
        keywords: dict[str, Any] = {
            "max_epochs": 2,
            "uneven_inputs": policy,
            "use_distributed_sampler": False,
        }
        trainer = quiet_trainer(strategy, len(counts), accumulate_grad_batches=accumulate, **keywords)
        trainer.fit(modules[rank], DataLoader(Stream(rank, counts[rank]), batch_size=None))
        return flat(modules[rank])

    return run_ranks(len(counts), fit)


def by_hand(counts: tuple[int, ...], accumulate: int) -> Tensor:
    """Train one process on all batches of each window at once."""
    model = Fit()
    optimizer = model.configure_optimizers()
    for first in [*range(0, max(counts), accumulate)] * 2:
        ends = [min(count, first + accumulate) for count in counts]
        window = [batch(rank, number) for rank, end in enumerate(ends) for number in range(first, end)]
        optimizer.zero_grad()
        loss_of(model.net, torch.cat(window)).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(
    ("counts", "accumulate"), [((5, 5), 3), ((4, 3), 2), ((7, 2, 4), 3), ((1, 2), 4), ((3, 5), 1)]
)
def test_join(counts: tuple[int, ...], accumulate: int, options: dict[str, Any]) -> None:
    """Each batch counts equally in its window, also where ranks run out, or the window is cut short."""
    expected = by_hand(counts, accumulate)
    for mine in fitted(counts, accumulate, "join", **options):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", ["error", "truncate"])
def test_a_window_that_is_cut_short(policy: str) -> None:
    """The last window of five batches is a mean over two, with other policies too."""
    expected = by_hand((5, 5), 3)
    for mine in fitted((5, 5 if policy == "error" else 6), 3, policy):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_one_process() -> None:
    """So is that of a process alone."""
    [mine] = fitted((5,), 3, "error")
    torch.testing.assert_close(mine, by_hand((5,), 3), rtol=0, atol=1e-12)

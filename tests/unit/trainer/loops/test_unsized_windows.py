"""Accumulation windows whose number of batches is known late: data without a length ends within them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.parameters import first
from tests.unit.gradient_sync.helpers import Sums, assert_each, batch, fit_on_ranks, stepped_alone
from tests.unit.trainer.helpers import Stream

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"sync_mode": "multi_auto_sync"},
    {"sync_mode": "forced_sync"},
    {"gradient_weighting": "logged"},
)


class Fit(Sums):
    """Fits with momentum, so that a step of another size changes all later ones; logs weights if asked to."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.strategy.gradient_weighting == "logged":
            self.log_weight(1)
        return self.loss([batch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(counts: tuple[int, ...], accumulate: int, policy: str, **options: Any) -> list[Tensor]:
    """Fit two epochs on threads; return each rank's weights."""
    return fit_on_ranks(
        [Fit() for _ in counts],
        lambda rank: DataLoader(Stream(batch(rank, n) for n in range(counts[rank])), batch_size=None),
        options,
        max_epochs=2,
        uneven_inputs=policy,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
    )


def by_hand(counts: tuple[int, ...], accumulate: int) -> Tensor:
    """Train one process on all batches of each window at once."""
    windows = []
    for start in range(0, max(counts), accumulate):
        ends = [min(count, start + accumulate) for count in counts]
        window = [batch(rank, number) for rank, end in enumerate(ends) for number in range(start, end)]
        windows.append(torch.cat(window))
    return stepped_alone(Fit(), windows * 2)


@pytest.mark.full
@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(
    ("counts", "accumulate"), first(3, [((5, 5), 3), ((1, 2), 4), ((7, 2, 4), 3), ((4, 3), 2), ((3, 5), 1)])
)
def test_join(counts: tuple[int, ...], accumulate: int, options: dict[str, Any]) -> None:
    """Each batch counts equally in its window, also where ranks run out, or the window is cut short."""
    assert_each(fitted(counts, accumulate, "join", **options), by_hand(counts, accumulate))


@pytest.mark.parametrize("policy", ["error", "truncate"])
def test_a_window_that_is_cut_short(policy: str) -> None:
    """The last window of five batches is a mean over two, with other policies too."""
    assert_each(fitted((5, 5 if policy == "error" else 6), 3, policy), by_hand((5, 5), 3))


def test_one_process() -> None:
    """So is that of a process alone."""
    assert_each(fitted((5,), 3, "error"), by_hand((5,), 3))

"""A batch of weight 0 is left out, also where its loss, and the gradients of that, are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import batch, net


class Tokens(TrainingModule):
    """A mean over the samples that count; over none it is NaN, or 0 if `at_least` says so."""

    def __init__(self, at_least: float) -> None:
        super().__init__()
        self.net = net()
        self.at_least = at_least

    def loss_and_weight(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        samples, counts = batch
        errors = (self.net(samples) - samples.sum(dim=1, keepdim=True)).square().squeeze(1)
        return (errors * counts).sum() / counts.sum().clamp_min(self.at_least), counts.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss_and_weight(batch)
        return {"loss": loss, "weight": weight}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ManualTokens(Tokens):
    """The same in manual optimisation."""

    def __init__(self, at_least: float) -> None:
        super().__init__(at_least)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, weight = self.loss_and_weight(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, weight=weight)
        optimizer.step()


def fitted(kind: type[Tokens], at_least: float, policy: str | None, mode: str, window: int = 1) -> Tensor:
    """Fit on two ranks, the second of which has batches in which nothing counts; return the weights."""
    counts = torch.ones(12, dtype=torch.float64)
    counts[[1, 3, 9]] = 0  # of rank 1: its first batch, and a half of its third
    loader = DataLoader(TensorDataset(batch(0, 0, 12), counts), batch_size=2)
    modules = [kind(at_least) for _ in range(2)]

    def fit(rank: int) -> None:
        strategy = ThreadedStrategy(rank, 2, gradient_weighting="logged", sync_mode=mode)
        options: dict[str, Any] = {"max_epochs": 1, "on_nonfinite": policy}
        quiet_trainer(strategy, 2, accumulate_grad_batches=window, **options).fit(modules[rank], loader)

    run_ranks(2, fit)
    weights = [nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules]
    assert torch.equal(weights[0], weights[1])
    return weights[0]


@pytest.mark.parametrize(
    ("kind", "mode", "window"),
    [(Tokens, "auto", 1), (Tokens, "auto", 2), (Tokens, "forced_sync", 1), (ManualTokens, "auto", 1)],
)
@pytest.mark.parametrize("policy", [None, "raise", "skip"])
def test_mean_over_nothing(kind: type[Tokens], mode: str, window: int, policy: str | None) -> None:
    """NaN is worth no more than 0 there: no rank raises or skips, and all weights are those of the others."""
    expected = fitted(kind, 1, policy, mode, window)
    assert torch.equal(fitted(kind, 0, policy, mode, window), expected)
    assert expected.isfinite().all()


class Hungry(Tokens):
    """Whatever a padding step computes is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss_and_weight(batch)
        is_repeated = bool(self.previous is batch[0]) if batch_idx else False
        self.previous: Tensor = batch[0]
        return loss * float("nan") if is_repeated else loss


def test_padding_step() -> None:
    """A repeated batch does not count, whatever comes of it."""
    samples = TensorDataset(batch(0, 0, 5), torch.ones(5, dtype=torch.float64))
    loader = DataLoader(samples, batch_size=1)
    modules = [Hungry(0) for _ in range(2)]

    def fit(rank: int) -> None:
        options: dict[str, Any] = {"uneven_inputs": "join", "on_nonfinite": "raise", "max_epochs": 1}
        quiet_trainer(ThreadedStrategy(rank, 2), 2, **options).fit(modules[rank], loader)

    run_ranks(2, fit)
    weights = [nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules]
    assert torch.equal(weights[0], weights[1])
    assert weights[0].isfinite().all()

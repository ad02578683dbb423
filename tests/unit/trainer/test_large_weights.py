"""Logged weights may be as large as they like, in float16 too: only what they are to each other counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.errors import NonFiniteLossError
from rankwise.strategies import SingleDeviceStrategy
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import batch, loss_of, net

WINDOW = 2


class Weighed(TrainingModule):
    """Weighs batches by something, times how large that is."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.net = net().float()
        self.size = size

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_weight(self.size * ((batch_idx + self.global_rank) % 3))
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ManuallyWeighed(Weighed):
    """The same in manual optimisation."""

    def __init__(self, size: float) -> None:
        super().__init__(size)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        weight = self.size * ((batch_idx + self.global_rank) % 3)
        self.manual_backward(loss_of(self.net, batch[0]), weight=weight)
        optimizer.step()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(batch(0, 0, 16).float()), batch_size=1)


def fit(strategy: Any, world_size: int, module: TrainingModule, precision: str, window: int) -> Tensor:
    """Fit in a precision, where any overflow raises; return the weights."""
    options: dict[str, Any] = {"precision": precision, "on_nonfinite": "raise", "max_epochs": 1}
    quiet_trainer(strategy, world_size, accumulate_grad_batches=window, **options).fit(module, loader())
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def fit_alone(size: float, precision: str) -> Tensor:
    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    return fit(strategy, 1, Weighed(size), precision, WINDOW)


def fit_on_two(kind: type[Weighed], size: float, precision: str, mode: str) -> Tensor:
    modules = [kind(size) for _ in range(2)]
    window = WINDOW if kind is Weighed else 1

    def run(rank: int) -> Tensor:
        strategy = ThreadedStrategy(rank, 2, gradient_weighting="logged", sync_mode=mode)
        return fit(strategy, 2, modules[rank], precision, window)

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("precision", ["16-true", "16-master"])
def test_one_process(precision: str) -> None:
    """A million times the weights give the same model, to the bit."""
    expected = fit_alone(1, precision)
    assert torch.equal(fit_alone(2.0**20, precision), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "mode"), [(Weighed, "auto"), (Weighed, "forced_sync"), (ManuallyWeighed, "auto")]
)
@pytest.mark.parametrize("precision", ["16-true", "16-master"])
def test_two_ranks(kind: type[Weighed], mode: str, precision: str) -> None:
    """The same between ranks, whoever averages gradients."""
    expected = fit_on_two(kind, 1, precision, mode)
    assert torch.equal(fit_on_two(kind, 2.0**20, precision, mode), expected)
    assert expected.isfinite().all()


def test_weights_that_grow() -> None:
    """The unit follows the weights."""

    class Growing(Weighed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_weight(4.0 ** (batch_idx // WINDOW * 2))
            return loss

    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    assert fit(strategy, 1, Growing(1), "16-true", WINDOW).isfinite().all()


def test_overflow_is_nobodys_loss() -> None:
    """A weight that is too large for the format beside the others: no rank's loss is said to be at fault."""

    class Sudden(Weighed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_weight(1.0 if batch_idx < WINDOW else 1e30)
            return loss

    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    with pytest.raises(NonFiniteLossError, match="though every rank's loss is finite"):
        fit(strategy, 1, Sudden(1), "16-true", WINDOW)

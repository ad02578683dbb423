"""A fit that continues begins with the buckets of the fit before."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer


class Branches(TrainingModule):
    """Two layers, of which only rank 0 uses the first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.side = nn.Linear(2, 2).double()
        self.head = nn.Linear(2, 1).double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.side(batch[0]) if self.trainer.global_rank == 0 else batch[0]
        loss: Tensor = self.head(hidden).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_ranks_that_use_different_layers_fit_again() -> None:
    """All use the order of rank 0: a rank whose own order is not complete does not wait alone."""
    data = TensorDataset(torch.arange(16, dtype=torch.float64).reshape(8, 2) / 8)

    def train(rank: int, fits: list[int]) -> list[Tensor]:
        module = Branches()
        strategy = ThreadedStrategy(rank, 2, find_unused_parameters=True)
        trainer = quiet_trainer(strategy, 2)
        for epochs in fits:
            trainer.max_epochs = epochs
            trainer.fit(module, DataLoader(data, batch_size=1))
        return [parameter.detach().clone() for parameter in module.parameters()]

    expected = run_ranks(2, lambda rank: train(rank, [2]))
    for mine, wanted in zip(run_ranks(2, lambda rank: train(rank, [1, 2])), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)

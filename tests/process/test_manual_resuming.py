"""Manual optimisation that accumulates gradients over batches: they go through checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import Trainer, TrainingModule
from tests.process.training_tasks import FEATURES, loader, saving_each_step, trainer_on

BATCHES = 5  # of an epoch, so that windows of two batches end in the next one


class Accumulating(TrainingModule):
    """One optimizer steps for each batch, the other for every second one."""

    number: Tensor

    def __init__(self, ways: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ways = ways
        torch.manual_seed(5)
        self.often = nn.Linear(FEATURES, 1).double()
        self.seldom = nn.Linear(FEATURES, 1).double()
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.number += 1
        steps = (self.step_often, self.step_seldom)
        for step in reversed(steps) if self.ways == "blocked first" else steps:
            step(*batch)

    def step_often(self, x: Tensor, y: Tensor) -> None:
        optimizer = self.optimizers()[0]
        with optimizer.toggled():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.often(x), y))
            optimizer.step()

    def step_seldom(self, x: Tensor, y: Tensor) -> None:
        optimizer = self.optimizers()[1]
        is_last = int(self.number) % 2 == 0
        if not is_last and self.ways != "never cleared":
            optimizer.zero_grad()
        is_blocked = self.ways.startswith("blocked") and not is_last
        with optimizer.toggled(), self.no_backward_sync(is_blocked):
            self.manual_backward(nn.functional.mse_loss(self.seldom(x), y) / 2)
        if is_last:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        layers = (self.often, self.seldom)
        return [torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9) for layer in layers]


def fitted(ways: str, devices: int, ckpt_path: Path | None = None, **options: Any) -> tuple[Trainer, Tensor]:
    trainer, module = trainer_on(devices, max_epochs=2, **options), Accumulating(ways)
    trainer.fit(module, loader(8 * BATCHES, 8 // devices), ckpt_path=ckpt_path)
    return trainer, nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("ways", ["averaged", "blocked", "blocked first", "never cleared"])
def test_a_checkpoint_has_the_gradients(ways: str, devices: int, tmp_path: Path) -> None:
    """A run that goes on between the batches of a window ends with the same weights."""
    trainer, expected = fitted(ways, devices, **saving_each_step(tmp_path))
    assert trainer.global_step == 3 * BATCHES
    for step in (1, 3, 7):
        _, weights = fitted(ways, devices, tmp_path / f"step={step}.ckpt")
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Gradients that two ranks have not averaged yet are averaged for a run on one."""
    _, expected = fitted("blocked first", 2, **saving_each_step(tmp_path))
    _, weights = fitted("blocked first", 1, tmp_path / "step=4.ckpt")
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)

"""The random state outside of stages is the same for any number of ranks; each stage draws new numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.process.training_tasks import Regression, loader, trainer_on


class Dropping(Regression):
    """Draws random numbers in training and in prediction."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(nn.functional.dropout(batch[0])), batch[1])

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.forward(nn.functional.dropout(torch.ones_like(batch[0])))


def drawn_after_stages(world_size: int) -> list[Any]:
    """Draw a number after each stage."""
    trainer, module = trainer_on(world_size, max_epochs=1), Dropping()
    torch.manual_seed(5)
    trainer.fit(module, loader(12, 2, shuffle=True), loader(6, 2))
    drawn = [float(torch.rand(()))]
    for stage in (trainer.validate, trainer.test, trainer.predict):
        stage(module, loader(6, 2))
        drawn.append(float(torch.rand(())))
    return drawn


@pytest.mark.quick
def test_splits_of_data_do_not_depend_on_the_number_of_ranks() -> None:
    """What a script draws between stages is the same on one process and in the caller of two ranks."""
    one, two = drawn_after_stages(1), drawn_after_stages(2)
    assert one == two
    assert len(set(one)) == len(one)


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_prediction_draws_new_numbers(world_size: int) -> None:
    """Dropout in prediction differs between calls, and between the ranks."""
    trainer, module = trainer_on(world_size, max_epochs=1), Dropping()
    found = [torch.cat(trainer.predict(module, loader(4, 2))) for _ in range(2)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0][:2], found[0][2:])  # two batches, of one rank each

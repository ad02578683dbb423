"""Mistakes between ranks: one error on every rank, before anything hangs."""

from __future__ import annotations

import pytest
from torch import nn

from rankwise.errors import WorkerRaisedError
from tests.process.helpers import ddp
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Uneven(Regression):
    """Rank 1 has a wider layer, and one more."""

    def setup(self, stage: str) -> None:
        if self.trainer.global_rank == 1:
            self.net[0] = nn.Linear(5, 8).double()
            self.extra = nn.Linear(1, 1).double()


def test_ranks_that_would_train_different_modules() -> None:
    """Which parameters differ is said before DDP sees them; one traceback stands for those of all ranks."""
    trainer = quiet_trainer(ddp("fork", grace_period_s=10.0), 2, max_epochs=1)
    with pytest.raises(WorkerRaisedError) as caught:
        trainer.fit(Uneven(), loader(16, 4))
    error = caught.value
    assert error.exception_type == "RankMismatchError"
    assert "float64, shape (7, 5) on global_rank 0; float64, shape (8, 5) on global_rank 1" in str(error)
    assert "parameter 'extra.bias': absent on global_rank 0" in str(error)
    assert error.consequences == ()
    assert str(error).count("Traceback (most recent call last)") == 1

"""A timer on two ranks: when the time is up on one rank, both stop after the same step."""

from typing import Any

from rankwise.callbacks import Timer
from rankwise.trainer import Trainer
from tests.process.training_tasks import Regression, loader, quiet_trainer


class OneRankIsLate(Regression):
    """On rank 1 alone an hour passes in batch 1."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer: Trainer = self.trainer
        [timer] = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
        if batch_idx == 1 and self.global_rank == 1:
            timer.load_state_dict({"time_elapsed": 3600.0})


def test_one_ranks_time_ends_training_on_all() -> None:
    """No rank waits for a stopped one, and the caller has the number of steps."""
    trainer = quiet_trainer("ddp_fork", 2, max_epochs=50, max_time={"hours": 1})
    trainer.fit(OneRankIsLate(), loader(48, 4))
    assert 2 <= trainer.global_step < 300
    assert trainer.should_stop

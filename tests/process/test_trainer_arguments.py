"""Arguments of the Trainer on two ranks: they do there what they do on one."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.callbacks import LambdaCallback, Timer
from rankwise.profilers import SimpleProfiler
from rankwise.trainer.loops import evaluation
from tests.process.training_tasks import Regression, loader, trainer_on


def stop(trainer: Any, *_: Any) -> None:
    trainer.should_stop = True


class Draws(Regression):
    """Draws random numbers in each step; counts the checks, and notes in which modes it is evaluated.

    Its learning rate depends on the number of all steps.
    """

    def __init__(self) -> None:
        super().__init__("adam")
        self.checked = 0
        self.modes: list[bool] = []

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        assert steps == (self.trainer.max_epochs or 0) * self.trainer.num_training_batches
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch.is_inference_mode_enabled())
        return super().forward(x)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        torch.rand(2)
        assert (self.trainer.model is not self) == (self.trainer.world_size > 1)
        self.checked += self.trainer.sanity_checking
        super().validation_step(batch, batch_idx)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:overfit_batches reads the training data in their order")
def test_arguments_of_fit() -> None:
    """Training on the first batches of the data, until `min_steps` are done, is one process's."""
    results = []
    for size in (1, 2):
        model, batch_size = Draws(), 8 // size
        options = {"max_epochs": 4, "overfit_batches": 2, "num_sanity_val_steps": 1, "min_steps": 5}
        trainer = trainer_on(size, callbacks=LambdaCallback(on_train_batch_end=stop), **options)
        trainer.fit(model, loader(32, batch_size, shuffle=True), loader(16, batch_size))
        assert (trainer.global_step, model.checked) == (5, 1)
        assert (trainer.state.fn, trainer.state.finished, trainer.interrupted) == ("fit", True, False)
        assert (trainer.num_devices, trainer.node_rank, trainer.model) == (size, 0, model)
        results.append([*model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_on", [True, False])
def test_inference_mode(is_on: bool) -> None:
    """Evaluation in inference mode gathers metrics and predictions on gloo."""
    found = []
    for size in (1, 2):
        model, trainer = Draws(), trainer_on(size, inference_mode=is_on)
        [metrics] = trainer.test(model, loader(14, 4))
        found.append((metrics, torch.cat(trainer.predict(model, loader(14, 4)))))
        assert set(model.modes) == {is_on}
    torch.testing.assert_close(*found, check_dtype=False)


@pytest.mark.quick
def test_each_rank_has_a_profile(tmp_path: Path) -> None:
    """Each rank measures its own batches, and writes a file; the caller gets what rank 0 has measured."""
    profiler = SimpleProfiler(tmp_path, "mine")
    trainer = trainer_on(2, max_epochs=1, profiler=profiler)
    trainer.fit(Draws(), loader(16, 4))
    assert profiler.summary() == (tmp_path / "fit-mine-0.txt").read_text().strip()
    assert len(profiler.recorded_durations["training_step"]) == 2
    for rank in range(2):
        rows = (tmp_path / f"fit-mine-{rank}.txt").read_text().splitlines()
        assert [row.split()[1] for row in rows if row.startswith(("backward", "training_step"))] == ["2", "2"]


class SeesValidation(Draws):
    """Rank 1's clock stands still."""

    def on_train_start(self) -> None:
        if self.trainer.global_rank == 1:
            vars(evaluation)["time"] = SimpleNamespace(monotonic=float)  # of this process alone


def test_validation_after_a_time() -> None:
    """Rank 0's clock decides for all ranks."""
    trainer = trainer_on(2, max_epochs=1, val_check_interval=timedelta(microseconds=1))
    trainer.fit(SeesValidation(), loader(16, 4), loader(8, 4))
    assert "val_loss" in trainer.callback_metrics


class OneRankIsLate(Regression):
    """On rank 1 alone an hour passes in batch 1."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            [timer] = [each for each in self.trainer.callbacks if isinstance(each, Timer)]
            timer.load_state_dict({"time_elapsed": 3600.0})


def test_one_ranks_time_ends_training_on_all() -> None:
    """No rank waits for a stopped one, and the caller has the number of steps."""
    trainer = trainer_on(2, max_epochs=50, max_time={"hours": 1})
    trainer.fit(OneRankIsLate(), loader(48, 4))
    assert 2 <= trainer.global_step < 300
    assert trainer.should_stop

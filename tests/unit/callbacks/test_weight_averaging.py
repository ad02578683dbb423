"""The average of the weights: in validations, checkpoints and at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import CheckpointError, InvalidArgumentError
from tests.unit.trainer.helpers import Line, loader, trainer


class Noted(Line):
    """Notes its weights after each optimizer step, and in each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(self.layer.weight.detach().clone())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.layer.weight.detach().clone())


def averages(weights: list[Tensor], decay: float) -> list[Tensor]:
    """Return the exponential moving average after each of the weights."""
    found = weights[:1]
    for each in weights[1:]:
        found.append(decay * found[-1] + (1 - decay) * each)
    return found


def test_equal_average(tmp_path: Path) -> None:
    """By default all steps count the same; the module has the average after the fit."""
    module = Noted()
    trainer(tmp_path, callbacks=WeightAveraging(), max_epochs=2).fit(module, loader())
    torch.testing.assert_close(module.layer.weight.detach(), torch.stack(module.trained).mean(0))


def test_exponential_average(tmp_path: Path) -> None:
    """Validations use the average; training goes on with its own weights."""
    module, alone = Noted(), Noted()
    trainer(tmp_path, callbacks=EMAWeightAveraging(decay=0.6), max_epochs=2).fit(module, loader(), loader())
    trainer(tmp_path, max_epochs=2).fit(alone, loader(), loader())
    expected = averages(alone.trained, 0.6)
    torch.testing.assert_close(module.trained, alone.trained)
    torch.testing.assert_close(module.validated, [expected[3], expected[7]])
    torch.testing.assert_close(module.layer.weight.detach(), expected[7])


def test_when_to_update(tmp_path: Path) -> None:
    """Steps and epochs are counted from 0."""
    module = Noted()
    averaging = EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_step=3)
    trainer(tmp_path, callbacks=averaging, max_epochs=2).fit(module, loader())
    torch.testing.assert_close(module.layer.weight.detach(), averages(module.trained[4::2], 0.5)[-1])
    module = Noted()
    averaging = EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=1)
    trainer(tmp_path, callbacks=averaging, max_epochs=3).fit(module, loader())
    torch.testing.assert_close(module.layer.weight.detach(), averages(module.trained[7::4], 0.5)[-1])


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}])
def test_a_run_that_continues(tmp_path: Path, options: dict[str, Any]) -> None:
    """A checkpoint has the average for others, and both for a run that continues."""
    whole, continued = Noted(), Noted()
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.6), saving]
    train = trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_epochs=2, **options)
    train.fit(whole, loader(), loader())
    path = tmp_path / "step=3.ckpt"
    saved = TorchCheckpointIO().load_checkpoint(path)
    torch.testing.assert_close(saved["state_dict"]["layer.weight"], averages(whole.trained, 0.6)[2])
    torch.testing.assert_close(saved["current_model_state"]["layer.weight"], whole.trained[2])
    train = trainer(tmp_path, callbacks=EMAWeightAveraging(decay=0.6), max_epochs=2, **options)
    train.fit(continued, loader(), loader(), ckpt_path=path)
    assert continued.layer.weight.tolist() == whole.layer.weight.tolist()
    trainer(tmp_path).validate(continued, loader(), ckpt_path=path)
    torch.testing.assert_close(continued.validated[-1], averages(whole.trained, 0.6)[2])


def test_a_failed_validation(tmp_path: Path) -> None:
    """The module then has its own weights, not the average."""

    class Failing(Noted):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("no such label")

    module = Failing()
    with pytest.raises(KeyError):
        trainer(tmp_path, callbacks=WeightAveraging()).fit(module, loader(), loader())
    torch.testing.assert_close(module.layer.weight.detach(), module.trained[-1])


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Without the number of averaged weights a run cannot continue."""
    saving = ModelCheckpoint(tmp_path, "own")
    callbacks: list[Any] = [WeightAveraging(), saving]
    trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True).fit(Noted(), loader())
    checkpoint = TorchCheckpointIO().load_checkpoint(saving.best_model_path)
    TorchCheckpointIO().save_checkpoint({**checkpoint, "averaging_state": {}}, saving.best_model_path)
    with pytest.raises(CheckpointError, match="number of averaged weights"):
        trainer(tmp_path, callbacks=WeightAveraging()).fit(
            Noted(), loader(), ckpt_path=saving.best_model_path
        )


@pytest.mark.parametrize("options", [{"decay": 1.5}, {"update_every_n_steps": -1}])
def test_wrong_values(options: dict[str, Any]) -> None:
    """Values that cannot work are refused in the constructor."""
    with pytest.raises(InvalidArgumentError):
        EMAWeightAveraging(**options)

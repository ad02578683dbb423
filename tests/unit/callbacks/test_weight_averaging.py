"""The average of the weights: in validations, checkpoints and at the end."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rankwise.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from rankwise.callbacks.weight_averaging import broadcast_buffers
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import CheckpointError, ConfigurationError, InvalidArgumentError, UnknownArgumentError
from rankwise.strategies import DDPStrategy
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, trainer


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
        super().validation_step(batch, batch_idx)


def averages(weights: list[Tensor], decay: float) -> list[Tensor]:
    """Return the exponential moving average after each of the weights."""
    found = weights[:1]
    for each in weights[1:]:
        found.append(decay * found[-1] + (1 - decay) * each)
    return found


def test_exponential_average(tmp_path: Path) -> None:
    """Validations use the average, of all steps alike by default; training goes on with its own weights."""
    module = Noted()
    fitted(tmp_path, module, callbacks=WeightAveraging(), max_epochs=2)
    torch.testing.assert_close(module.layer.weight.detach(), torch.stack(module.trained).mean(0))
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
    train = trainer(tmp_path, callbacks=[EMAWeightAveraging(decay=0.6), saving], max_epochs=2, **options)
    train.fit(whole, loader(), loader())
    path = tmp_path / "step=3.ckpt"
    saved = TorchCheckpointIO().load_checkpoint(path)
    torch.testing.assert_close(saved["state_dict"]["layer.weight"], averages(whole.trained, 0.6)[2])
    torch.testing.assert_close(saved["current_model_state"]["layer.weight"], whole.trained[2])
    options = {"callbacks": EMAWeightAveraging(decay=0.6), "max_epochs": 2, **options}
    fitted(tmp_path, continued, loader(), loader(), ckpt_path=path, **options)
    assert continued.layer.weight.tolist() == whole.layer.weight.tolist()
    trainer(tmp_path).validate(continued, loader(), ckpt_path=path)
    torch.testing.assert_close(continued.validated[-1], averages(whole.trained, 0.6)[2])


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}])
def test_weights_only(tmp_path: Path, options: dict[str, Any]) -> None:
    """Checkpoints of weights have the average, within a validation and after a step."""
    for name, moment in (("step", {"every_n_train_steps": 3}), ("validation", {"monitor": "val_loss"})):
        module, folder = Noted(), tmp_path / name
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_weights_only=True, **cast(Any, moment))
        callbacks = [EMAWeightAveraging(decay=0.6, **options), saving]
        fitted(folder, module, loader(), loader(), callbacks=callbacks, val_check_interval=2)
        expected = averages(module.trained, 0.6)
        for path in folder.glob("*.ckpt"):
            saved, step = TorchCheckpointIO().load_checkpoint(path), int(path.stem.removeprefix("step="))
            assert saved.keys().isdisjoint({"callbacks", "current_model_state"})
            torch.testing.assert_close(saved["state_dict"]["layer.weight"], expected[step - 1])
        assert len(list(folder.glob("*.ckpt"))) == {"step": 1, "validation": 2}[name]


def test_a_failed_validation(tmp_path: Path) -> None:
    """The module then has its own weights, not the average."""

    def fail(batch: Any, batch_idx: int) -> None:
        raise KeyError("no such label")

    module = Noted()
    module.validation_step = fail  # type: ignore[method-assign]
    raises(KeyError, None, trainer(tmp_path, callbacks=WeightAveraging()).fit, module, loader(), loader())
    torch.testing.assert_close(module.layer.weight.detach(), module.trained[-1])


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Without the number of averaged weights a run cannot continue."""
    saving = ModelCheckpoint(tmp_path, "own")
    fitted(tmp_path, Noted(), callbacks=[WeightAveraging(), saving])
    path = saving.best_model_path
    checkpoint = TorchCheckpointIO().load_checkpoint(path)
    TorchCheckpointIO().save_checkpoint({**checkpoint, "averaging_state": {}}, path)
    with pytest.raises(CheckpointError, match="number of averaged weights"):
        fitted(tmp_path, Noted(), callbacks=WeightAveraging(), ckpt_path=path)


def test_wrong_arguments() -> None:
    """Values that cannot work are refused in the constructor; keywords that would do nothing by name."""
    options = ("update_every_n_steps", "update_starting_at_step", "update_starting_at_epoch")
    for name, value in {"decay": 1.5, **dict.fromkeys(options, -1)}.items():
        raises(InvalidArgumentError, None, EMAWeightAveraging, **{name: cast(Any, value)})
    raises(UnknownArgumentError, "takes no argument 'use_bufers'", WeightAveraging, use_bufers=False)
    for name in ("avg_fn", "multi_avg_fn"):
        text = f"takes no argument '{name}'.*\n  Fix: WeightAveraging"
        raises(UnknownArgumentError, text, EMAWeightAveraging, **{name: cast(Any, torch.add)})
    raises(UnknownArgumentError, "'decay'", EMAWeightAveraging, decays=0.5)


class Counting(Noted):
    """Counts its training steps in a buffer."""

    count: Any
    twice: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("twice", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.twice += 2


def test_buffers(tmp_path: Path) -> None:
    """Those that are not averaged are saved as they are then; all are shared as one value of a broadcast."""
    saving = ModelCheckpoint(tmp_path, "own")
    callbacks: list[Any] = [EMAWeightAveraging(use_buffers=False, update_every_n_steps=2), saving]
    trainer(tmp_path, callbacks=callbacks).fit(Counting(), loader())
    saved = TorchCheckpointIO().load_checkpoint(saving.best_model_path)
    assert saved["state_dict"]["count"] == saved["current_model_state"]["count"] == 4
    shared: list[Any] = []

    class Noting(DDPStrategy):
        def broadcast(self, obj: Any, src: int = 0) -> Any:
            shared.append([float(tensor) for tensor in obj])
            return [tensor + 1 for tensor in obj]

    module = Counting()
    broadcast_buffers(module, Noting(accelerator="cpu", devices=1))
    assert shared == [[0, 0]]
    assert (module.count, module.twice) == (1, 1)


@pytest.mark.parametrize("make", [WeightAveraging, EMAWeightAveraging, StochasticWeightAveraging])
def test_post_local_sgd_is_refused(tmp_path: Path, make: Any) -> None:
    """Its ranks have weights of their own: an average of one rank's is not that of the run."""
    strategy = DDPStrategy(accelerator="cpu", devices=1, comm_hook="post_localsgd", model_averaging_period=2)
    callback = make(swa_lrs=0.1) if make is StochasticWeightAveraging else make()
    text = f"{make.__name__} cannot work with a strategy that averages models"
    with pytest.raises(ConfigurationError, match=text):
        trainer(tmp_path, callbacks=callback, strategy=strategy).fit(Noted(), loader())

"""Parameter groups that callbacks add to an optimizer: sent back to the caller, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.trainer import Trainer
from tests.unit.trainer.helpers import Line, fit_elsewhere, fitted, loader, saved, trainer


class Tuned(Line):
    """Its optimizer has the last layer, and a scale that is in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 1)
        self.scale = [nn.Parameter(torch.ones(1))]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.last(self.layer(batch[0])) * self.scale[0], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.last.parameters(), *self.scale], lr=0.1)


class AddGroups(Callback):
    """Adds a layer's weight in the second epoch, then its bias."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        [optimizer] = trainer.optimizers
        if trainer.current_epoch == 1:
            optimizer.add_param_group({"params": module.layer.weight, "lr": 0.01})
        if trainer.current_epoch == 2:
            optimizer.add_param_group({"params": module.layer.bias, "lr": 0.02})


class AddScale(Callback):
    """Adds a parameter that is in no module."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": nn.Parameter(torch.ones(3))})


def fit(folder: Path, max_epochs: int, **options: Any) -> tuple[Trainer, Tuned]:
    """Return a trainer with the callback, and a module to fit."""
    return trainer(folder, max_epochs=max_epochs, callbacks=[AddGroups()], **options), Tuned()


def groups(train: Trainer) -> list[Any]:
    """Return learning rates, values and states of all groups."""
    [optimizer] = train.optimizers
    return [
        (group["lr"], [(each.detach(), optimizer.state[each]["exp_avg"]) for each in group["params"]])
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-master"])
def test_groups_come_back(precision: str, tmp_path: Path) -> None:
    """The caller's optimizer has the groups, options and states of a fit elsewhere, and the next fit too."""
    here, model = fit(tmp_path, 2, precision=precision)
    there, copied = fit(tmp_path, 2, precision=precision)
    here.fit(model, loader())
    fit_elsewhere(there, copied)
    torch.testing.assert_close(groups(there), groups(here), rtol=0, atol=0)
    torch.testing.assert_close(copied.scale, model.scale, rtol=0, atol=0)
    here.max_epochs = there.max_epochs = 4
    here.fit(model, loader())
    fit_elsewhere(there, copied)
    torch.testing.assert_close(groups(there), groups(here), rtol=0, atol=0)
    assert len(groups(here)) == 3


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-master"])
@pytest.mark.parametrize("epochs", [2, 3])
def test_groups_are_resumed(epochs: int, precision: str, tmp_path: Path) -> None:
    """A run that continues from a checkpoint has the groups, and the values that are in no module."""
    options = {"precision": precision, "enable_checkpointing": True}
    whole, model = fit(tmp_path, 5, precision=precision)
    whole.fit(model, loader())
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", save_last=True)
    fitted(tmp_path, Tuned(), max_epochs=epochs, callbacks=[AddGroups(), saving], **options)
    second, resumed = fit(tmp_path, 5, precision=precision)
    second.fit(resumed, loader(), ckpt_path=tmp_path / "saved" / "last.ckpt")
    torch.testing.assert_close(groups(second), groups(whole), rtol=0, atol=0)


def test_a_parameter_that_is_in_no_module(tmp_path: Path) -> None:
    """A parameter that a hook adds must be registered, or training cannot continue; the error says so."""
    train, model = trainer(tmp_path, callbacks=[AddScale()]), Tuned()
    fit_elsewhere(train, model)
    train.max_epochs = 2
    with pytest.raises(ConfigurationError, match="a parameter that is in no"):
        fit_elsewhere(train, model)
    path = saved(tmp_path, Tuned(), callbacks=[AddScale()])
    with pytest.raises(CheckpointError, match="a parameter that is in no module"):
        trainer(tmp_path, max_epochs=2).fit(Tuned(), loader(), ckpt_path=path)


def test_other_groups_do_not_fit(tmp_path: Path) -> None:
    """An optimizer with other parameters than those that were saved is refused, as before."""
    path = saved(tmp_path, Tuned(), max_epochs=2, callbacks=[AddGroups()])

    class Other(Tuned):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([{"params": [each]} for each in (*self.parameters(), *self.scale)])

    with pytest.raises(CheckpointError, match="does not fit the optimizers"):
        trainer(tmp_path, max_epochs=3).fit(Other(), loader(), ckpt_path=path)

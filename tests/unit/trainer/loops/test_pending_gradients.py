"""Gradients of manual optimisation that wait for a step: in checkpoints, and between two fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import Trainer, TrainingModule
from rankwise.callbacks import ModelCheckpoint
from rankwise.errors import CheckpointError
from tests.process.training_tasks import quiet_trainer
from tests.unit.trainer.helpers import fit_elsewhere, loader, saved, trainer

BATCHES = 5  # of an epoch, so that windows of two batches end in the next one


class Waiting(TrainingModule):
    """One optimizer steps for each batch; the other for every second one, and clips in each."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(5)
        self.often, self.seldom = nn.Linear(2, 1), nn.Linear(2, 1)
        self.outside = [nn.Parameter(torch.ones(1))]  # known to an optimizer only
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        often, seldom = self.optimizers()
        self.number += 1
        is_last = int(self.number) % 2 == 0
        if not is_last:
            seldom.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.seldom(x) * self.outside[0].to(x.dtype), y))
        self.clip_gradients(seldom, 0.5)
        if is_last:
            seldom.step()
        often.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.often(x), y))
        often.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.often.parameters(), lr=0.125),
            torch.optim.SGD([*self.seldom.parameters(), *self.outside], lr=0.125),
        ]

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector([*self.parameters(), *self.outside]).detach()


def fitted(folder: Path, **options: Any) -> Tensor:
    ckpt_path = options.pop("ckpt_path", None)
    model = Waiting()
    trainer(folder, **{"max_epochs": 2, **options}).fit(model, loader(2 * BATCHES), ckpt_path=ckpt_path)
    return model.weights()


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "16-master", "bf16-master"])
def test_checkpoints_between_clipping_and_step(tmp_path: Path, precision: str) -> None:
    """A run that goes on from such a checkpoint ends with the same weights, to the last bit."""
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    options: dict[str, Any] = {"precision": precision}
    expected = fitted(tmp_path, callbacks=saving, **options)
    torch.testing.assert_close(fitted(tmp_path, **options), expected, rtol=0, atol=0)
    for step in (1, 3, 4, 7):
        weights = fitted(tmp_path, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def fit_once(train: Trainer, model: Waiting, *, is_pickled: bool) -> None:
    """Fit here, or as spawn does."""
    if is_pickled:
        fit_elsewhere(train, model, data=loader(2 * BATCHES))
    else:
        train.fit(model, loader(2 * BATCHES))


def fit_twice(way: str, between: Any = lambda model, optimizers: None, **options: Any) -> Tensor:
    train = quiet_trainer("ddp_fork" if way == "forked" else "single_device", 1, max_epochs=1, **options)
    model = Waiting()
    fit_once(train, model, is_pickled=way == "pickled")
    between(model, train.optimizers)
    train.max_epochs = 2
    fit_once(train, model, is_pickled=way == "pickled")
    return model.weights()


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "precision"),
    [("here", "32-true"), ("here", "16-master"), ("forked", "16-master"), ("pickled", "16-mixed")],
)
def test_two_fits_are_one(tmp_path: Path, way: str, precision: str) -> None:
    """Two fits of an epoch end as one of two, also in processes of their own."""
    expected = fitted(tmp_path, precision=precision)
    torch.testing.assert_close(fit_twice(way, precision=precision), expected, rtol=0, atol=0)


def test_optimizers_are_created_at_their_first_use() -> None:
    """Gradients of the module's own parameters come back without them."""
    train, model = quiet_trainer("single_device", 1, max_epochs=1), Waiting()
    model.outside[0].requires_grad_(False)
    fit_once(train, model, is_pickled=True)
    assert model.seldom.weight.grad is not None
    assert train._optimizers.optimizers == []


@pytest.mark.full
@pytest.mark.parametrize("by", ["module", "optimizer", "value"])
@pytest.mark.parametrize("way", ["here", "forked", "pickled"])
def test_changed_between_two_fits(way: str, by: str) -> None:
    """Gradients are the module's between two fits: a program may clear or change them."""

    def change(model: Waiting, optimizers: list[torch.optim.Optimizer]) -> None:
        assert model.seldom.weight.grad is not None
        assert model.outside[0].grad is not None
        if by == "value":
            model.seldom.weight.grad.fill_(3.0)
        elif by == "module":
            model.zero_grad()
        else:
            optimizers[1].zero_grad()

    class ByHand(Waiting):
        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch == 0:
                change(self, self.trainer.optimizers)

    expected = ByHand()
    quiet_trainer("single_device", 1, max_epochs=2).fit(expected, loader(2 * BATCHES))
    torch.testing.assert_close(fit_twice(way, change), expected.weights(), rtol=0, atol=0)


def test_a_checkpoint_within_a_step(tmp_path: Path) -> None:
    """The batch in progress is repeated, so its gradients are in no checkpoint."""

    class Saving(Waiting):
        def clip_gradients(self, *arguments: Any) -> None:
            super().clip_gradients(*arguments)
            if int(self.number) == 3:
                self.trainer.save_checkpoint(tmp_path / "within.ckpt")

    trainer(tmp_path).fit(Saving(), loader(2 * BATCHES))
    assert "gradients" not in torch.load(tmp_path / "within.ckpt")


def test_a_checkpoint_after_a_fit(tmp_path: Path) -> None:
    """It has the gradients that are on the parameters, also on those that are in no module."""
    gradients = torch.load(saved(tmp_path, Waiting(), loader(2 * BATCHES)))["gradients"]
    assert {"seldom.weight", "seldom.bias", "2 of optimizer 1"} <= set(gradients)


def test_gradients_for_another_precision(tmp_path: Path) -> None:
    """Scaled gradients are refused where losses are not scaled."""
    path = saved(tmp_path, Waiting(), loader(2 * BATCHES), precision="16-mixed")
    with pytest.raises(CheckpointError, match="holds gradients that wait"):
        fitted(tmp_path, ckpt_path=path)

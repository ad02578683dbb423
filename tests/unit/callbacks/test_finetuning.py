"""Freezing a part of a module, and training it later."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from rankwise.errors import ConfigurationError, InvalidArgumentError
from tests.unit.trainer.helpers import Line, loader, trainer


class WithBackbone(Line):
    """A head over a backbone; notes the backbone's weights and rate at the start of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.weights: list[Tensor] = []
        self.rates: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layer(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.1, 0.9)

    def on_train_epoch_start(self) -> None:
        self.weights.append(self.backbone[0].weight.detach().clone())
        groups = self.trainer.optimizers[0].param_groups
        self.rates.append(groups[1]["lr"] if len(groups) > 1 else 0.0)


def test_the_backbone_is_trained_later(tmp_path: Path) -> None:
    """It is frozen until its epoch; then its rate rises until it is the head's."""
    module = WithBackbone()
    callback = BackboneFinetuning(1, backbone_initial_ratio_lr=0.3)
    trainer(tmp_path, callbacks=callback, max_epochs=4).fit(module, loader())
    assert torch.equal(module.weights[0], module.weights[1])
    assert not torch.equal(module.weights[1], module.weights[2])
    assert module.rates == pytest.approx([0, 0.03, 0.06, 0.1])
    assert callback.previous_backbone_lr == pytest.approx(0.1)


def test_a_run_that_continues(tmp_path: Path) -> None:
    """It trains what the first one did, at the same rates, to the same weights."""
    whole, continued = WithBackbone(), WithBackbone()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    callbacks: list[Any] = [BackboneFinetuning(1, should_align=False, verbose=True), saving]
    trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_epochs=4).fit(whole, loader())
    again = BackboneFinetuning(1, should_align=False)
    path = tmp_path / "epoch=1.ckpt"
    trainer(tmp_path, callbacks=again, max_epochs=4).fit(continued, loader(), ckpt_path=path)
    assert continued.rates == whole.rates[2:]
    assert continued.backbone[0].weight.tolist() == whole.backbone[0].weight.tolist()


def test_no_backbone(tmp_path: Path) -> None:
    """A module without one is refused before training."""
    with pytest.raises(ConfigurationError, match="finds no backbone"):
        trainer(tmp_path, callbacks=BackboneFinetuning()).fit(Line(), loader())
    with pytest.raises(InvalidArgumentError):
        BackboneFinetuning(-1)


def test_a_divisor_that_nothing_uses() -> None:
    """The rate of the backbone has arguments of its own; a subclass may use the divisor."""

    class Own(BackboneFinetuning):
        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(module, optimizer, initial_denom_lr=self.initial_denom_lr)

    with pytest.raises(ConfigurationError, match=r"initial_denom_lr=5\.0\) has no effect"):
        BackboneFinetuning(initial_denom_lr=5.0)
    assert Own(initial_denom_lr=5.0).initial_denom_lr == 5.0


class NormOnly(BaseFinetuning):
    """Freezes everything but batch normalisation."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, train_bn=False)


class AllFrozen(BaseFinetuning):
    """Freezes everything, until the second epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer)


def test_statistics_of_a_run_that_continues(tmp_path: Path) -> None:
    """After the unfreeze batch normalisation goes on to update them."""
    whole, continued = WithBackbone(), WithBackbone()
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    callbacks: list[Any] = [AllFrozen(), saving]
    trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_epochs=4).fit(whole, loader())
    path = tmp_path / "epoch=1.ckpt"
    trainer(tmp_path, callbacks=AllFrozen(), max_epochs=4).fit(continued, loader(), ckpt_path=path)
    assert continued.backbone[1].track_running_stats
    assert continued.backbone[1].running_mean.tolist() == whole.backbone[1].running_mean.tolist()


def test_batch_normalisation(tmp_path: Path) -> None:
    """It stays trainable unless told otherwise, and can be left out of a new group."""
    module = WithBackbone()
    train = trainer(tmp_path, callbacks=NormOnly(), max_epochs=2)
    train.fit(module, loader())
    first, second = train.optimizers[0].param_groups
    assert len(first["params"]) == 4
    assert [id(each) for each in second["params"]] == list(map(id, module.backbone[0].parameters()))
    assert second["lr"] == pytest.approx(0.01)
    BaseFinetuning.freeze(module.backbone, train_bn=False)
    assert not any(each.requires_grad for each in module.backbone.parameters())
    assert module.backbone[1].track_running_stats is False
    assert list(BaseFinetuning.filter_params(module.backbone, requires_grad=False)) == list(
        module.backbone.parameters()
    )

"""Freezing a part of a module, and training it later."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.callbacks import BackboneFinetuning, BaseFinetuning
from rankwise.errors import ConfigurationError, InvalidArgumentError
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, whole_and_continued


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
    fitted(tmp_path, module, callbacks=callback, max_epochs=4)
    assert torch.equal(module.weights[0], module.weights[1])
    assert not torch.equal(module.weights[1], module.weights[2])
    assert module.rates == pytest.approx([0, 0.03, 0.06, 0.1])
    assert callback.previous_backbone_lr == pytest.approx(0.1)


def test_no_backbone(tmp_path: Path) -> None:
    """A module without one is refused; so is the divisor, unless a subclass (here a dataclass) uses it."""
    raises(ConfigurationError, "finds no backbone", fitted, tmp_path, callbacks=BackboneFinetuning())
    raises(InvalidArgumentError, "unfreeze_backbone_at_epoch", BackboneFinetuning, -1)

    @dataclass
    class Own(BackboneFinetuning):
        divisor: float = 5.0

        def __post_init__(self) -> None:
            super().__init__(initial_denom_lr=self.divisor)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(module, optimizer, initial_denom_lr=self.initial_denom_lr)

    raises(ConfigurationError, r"lr=5\.0\) has no effect", BackboneFinetuning, initial_denom_lr=5.0)
    assert Own().initial_denom_lr == 5.0


class Frozen(BaseFinetuning):
    """Freezes everything until the second epoch, or everything but batch normalisation."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm = norm

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=not self.norm)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, train_bn=self.norm)


@pytest.mark.parametrize(
    "make", [lambda: BackboneFinetuning(1, should_align=False, verbose=True), lambda: Frozen(norm=True)]
)
def test_a_run_that_continues(tmp_path: Path, make: Callable[[], BaseFinetuning]) -> None:
    """It trains what the first one did, at the same rates, to the same weights and statistics."""
    whole, continued = whole_and_continued(tmp_path, WithBackbone, make, 1, max_epochs=4)
    assert continued.rates == whole.rates[2:]
    ours, theirs = continued.backbone, whole.backbone
    assert ours[0].weight.tolist() == theirs[0].weight.tolist()
    assert ours[1].track_running_stats
    assert ours[1].running_mean.tolist() == theirs[1].running_mean.tolist()


def test_batch_normalisation(tmp_path: Path) -> None:
    """It stays trainable unless told otherwise, and can be left out of a new group."""
    module = WithBackbone()
    train = fitted(tmp_path, module, callbacks=Frozen(norm=False), max_epochs=2)
    first, second = train.optimizers[0].param_groups
    assert len(first["params"]) == 4
    assert [id(each) for each in second["params"]] == list(map(id, module.backbone[0].parameters()))
    assert second["lr"] == pytest.approx(0.01)
    BaseFinetuning.freeze(module.backbone, train_bn=False)
    assert not any(each.requires_grad for each in module.backbone.parameters())
    assert module.backbone[1].track_running_stats is False
    parameters = list(module.backbone.parameters())
    assert list(BaseFinetuning.filter_params(module.backbone, requires_grad=False)) == parameters

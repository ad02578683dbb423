"""`BackboneFinetuning`: train a module's `backbone` from a later epoch on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from rankwise.callbacks.weights.finetuning import BaseFinetuning
from rankwise.checks import check_minimum
from rankwise.errors import ConfigurationError
from rankwise.ranks import rank_zero_only

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule

_log = logging.getLogger(__name__)
_DENOMINATOR = 10.0  # the default of `unfreeze_and_add_param_group`


def multiplicative(epoch: int) -> float:
    """Return 2: the backbone's learning rate doubles in each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Freeze `module.backbone`, and train it from an epoch on, with a learning rate that then rises.

    Args:
        unfreeze_backbone_at_epoch: the first epoch in which the backbone is trained.
        lambda_func: gets the number of an epoch; returns the factor for the backbone's learning rate.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a part of the first group's.
        backbone_initial_lr: the first learning rate itself, instead.
        should_align: the backbone's learning rate stops at the first group's.
        initial_denom_lr: 10.0; another value only for a subclass whose `finetune_function` uses it.
        train_bn: whether batch normalisation in the backbone is trained from the start.
        verbose: log the learning rates of each epoch.
        rounding: digits of these.

    Attributes:
        previous_backbone_lr: the backbone's learning rate; None while it is frozen.

    Raises:
        InvalidArgumentError: for a negative epoch.
        ConfigurationError: for an `initial_denom_lr` that nothing would use.
        ConfigurationError: in `fit`, if the module's `backbone` is not a module.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = _DENOMINATOR,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        check_minimum("unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, 0)
        is_unused = type(self).finetune_function is BackboneFinetuning.finetune_function
        if is_unused and initial_denom_lr != _DENOMINATOR:
            raise ConfigurationError(
                message=f"BackboneFinetuning(initial_denom_lr={initial_denom_lr}) has no effect.",
                facts="backbone_initial_ratio_lr and backbone_initial_lr determine the learning rate.",
                remedy="leave it out, and give one of them.",
            )
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            raise ConfigurationError(
                message=f"BackboneFinetuning finds no backbone in {type(module).__name__}.",
                facts=f"its backbone is {getattr(module, 'backbone', None)!r}.",
                remedy="self.backbone = ..., a torch.nn.Module, in its __init__.",
            )

    def freeze_before_training(self, module: TrainingModule) -> None:
        self.previous_backbone_lr = None
        self.freeze(module.backbone, train_bn=self.train_bn)

    def finetune_function(self, module: TrainingModule, epoch: int, optimizer: Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            own = self.backbone_initial_lr
            self.previous_backbone_lr = rate * self.backbone_initial_ratio_lr if own is None else own
            self.unfreeze_and_add_param_group(
                module.backbone,
                optimizer,
                self.previous_backbone_lr,
                initial_denom_lr=self.initial_denom_lr,
                train_bn=self.train_bn,
            )
        elif self.previous_backbone_lr is not None:
            following = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            self.previous_backbone_lr = min(following, rate) if self.should_align else following
            optimizer.param_groups[-1]["lr"] = self.previous_backbone_lr
        else:
            return
        if self.verbose:
            rates = round(rate, self.rounding), round(self.previous_backbone_lr or 0.0, self.rounding)
            rank_zero_only(_log.info)("BackboneFinetuning: epoch %d, lr %s, backbone lr %s", epoch, *rates)

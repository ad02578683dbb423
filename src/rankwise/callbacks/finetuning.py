"""`BaseFinetuning`: freeze a part of a module, and train it later; `BackboneFinetuning`: its `backbone`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankwise.callbacks.base import Callback
from rankwise.checks import check_minimum
from rankwise.errors import ConfigurationError
from rankwise.ranks import rank_zero_only

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.trainer import Trainer, TrainingModule

_log = logging.getLogger(__name__)
_DENOMINATOR = 10.0  # the default of `unfreeze_and_add_param_group`
Modules = nn.Module | Iterable[nn.Module]


class BaseFinetuning(Callback):
    """Base class: override `freeze_before_training` and `finetune_function`.

    Checkpoints record which parameters are trained: a run that continues trains the same ones, and the same
    layers of batch normalisation update their statistics.
    """

    def __init__(self) -> None:
        self._trained: list[str] | None = None  # the names of the trained parameters
        self._tracking: list[str] | None = None  # the names of the layers that update their statistics

    def freeze_before_training(self, module: TrainingModule) -> None:
        """Freeze parts of the module, before it is moved to its device."""
        raise NotImplementedError

    def finetune_function(self, module: TrainingModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze parts of the module; called at the start of each epoch, for each optimizer."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self._trained, "tracking": self._tracking}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trained, self._tracking = (
            None if names is None else [str(name) for name in names]
            for names in (state_dict["trained"], state_dict.get("tracking"))
        )

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit" and (trainer.global_step == 0 or self._trained is None):
            self._trained = self._tracking = None
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        """Train what the run that continues has trained."""
        if self._trained is not None:
            trained = set(self._trained)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in trained)
        if self._tracking is not None:
            for name, layer in _statistics_of(module):
                layer.track_running_stats = name in self._tracking

    def on_train_epoch_start(self, trainer: Trainer, module: TrainingModule) -> None:
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)
        self._trained = [name for name, each in module.named_parameters() if each.requires_grad]
        self._tracking = [name for name, layer in _statistics_of(module) if layer.track_running_stats]

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the submodules that have parameters or buffers of their own, or no submodules."""
        given = [modules] if isinstance(modules, nn.Module) else list(modules)
        found = dict.fromkeys(part for module in given for part in module.modules())
        return [part for part in found if part._parameters or part._buffers or not [*part.children()]]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:
        """Yield the parameters with this `requires_grad`; without `train_bn`, not batch normalisation's."""
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm) and not train_bn:
                continue
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters, and let batch normalisation update its statistics."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trainable(part, is_trainable=True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a module's own parameters; batch normalisation then keeps its statistics."""
        _set_trainable(module, is_trainable=False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze modules and their submodules; with `train_bn`, batch normalisation stays trainable."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trainable(part, is_trainable=isinstance(part, _BatchNorm) and train_bn)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not have yet."""
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return [each for each in params if id(each) not in known]

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add a group with their parameters that the optimizer does not have yet.

        Args:
            modules: a module, or several.
            optimizer: gets the group.
            lr: the group's learning rate; by default the first group's, divided by `initial_denom_lr`.
            initial_denom_lr: used without `lr` only.
            train_bn: whether the group has the parameters of batch normalisation.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        parameters = BaseFinetuning.filter_params(modules, train_bn=train_bn)
        if own := BaseFinetuning.filter_on_optimizer(optimizer, parameters):
            optimizer.add_param_group({"params": own, "lr": rate})


def _set_trainable(part: nn.Module, *, is_trainable: bool) -> None:
    if isinstance(part, _BatchNorm):
        part.track_running_stats = is_trainable
    for parameter in part.parameters(recurse=False):
        parameter.requires_grad = is_trainable


def _statistics_of(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the layers of batch normalisation that have statistics, with their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield name, layer


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

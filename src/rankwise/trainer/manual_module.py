"""`ManualModule`: what a training module that optimises manually calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from rankwise.trainer.arguments import check_choice
from rankwise.trainer.manual_optimization import ManualOptimization, ManualOptimizer

if TYPE_CHECKING:
    from rankwise.trainer.trainer import Trainer

__all__ = ["ManualModule"]


class ManualModule:
    """The part of `TrainingModule` for several optimizers, or steps at any time.

    Set `self.automatic_optimization = False` in `__init__`; then `training_step` does the rest:

        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()

    Attributes:
        automatic_optimization: whether the Trainer runs backward and steps the optimizer.
    """

    automatic_optimization: bool = True

    if TYPE_CHECKING:
        trainer: Trainer

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them if there is not exactly one.

        In manual optimisation their `step` and `zero_grad` go through the trainer and its precision.
        """
        running = self.trainer.running_manual_optimization
        return _one_or_all(self.trainer.optimizers if running is None else running.optimizers)

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, or the list of them if there is not exactly one.

        In manual optimisation nobody else steps them.
        """
        return _one_or_all([config.scheduler for config in self.trainer.lr_scheduler_configs])

    def manual_backward(self, loss: Tensor, weight: float | Tensor | None = None, **options: Any) -> None:
        """Compute gradients of `loss`, and average them over the ranks.

        Collective: every rank must call this, equally often.

        Args:
            loss: a mean, over tokens for example.
            weight: with `gradient_weighting="logged"`, over how many it is the mean; it may be 0.
            options: `Tensor.backward`'s.

        Raises:
            LifecycleError: outside of manual optimisation.
            ConfigurationError: when a weight is missing, or cannot be used.
        """
        self._manual.backward(loss, weight, **options)

    def no_backward_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a block in which `manual_backward` leaves gradients as they are on this rank.

        For accumulating them: the first backward pass after the block averages what has come together.

        Raises:
            LifecycleError: outside of manual optimisation.
        """
        return self._manual.blocked(enabled)

    def toggle_optimizer(self, optimizer: ManualOptimizer | Optimizer) -> None:
        """Let only this optimizer's parameters require gradients: less to compute and to average.

        Raises:
            LifecycleError: outside of manual optimisation.
        """
        self._manual.toggle(_plain(optimizer))

    def untoggle_optimizer(self, optimizer: ManualOptimizer | Optimizer | None = None) -> None:
        """Undo `toggle_optimizer`.

        Raises:
            LifecycleError: outside of manual optimisation.
        """
        self._manual.untoggle()

    def clip_gradients(
        self,
        optimizer: ManualOptimizer | Optimizer,
        gradient_clip_val: float,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Clip an optimizer's gradients, in true size, by `"norm"` or `"value"`.

        Raises:
            InvalidArgumentError: for another algorithm.
        """
        precision = self.trainer.strategy.precision
        if check_choice("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value")) == "norm":
            precision.clip_gradients_norm(_plain(optimizer), gradient_clip_val)
        else:
            precision.clip_gradients_value(_plain(optimizer), gradient_clip_val)

    @property
    def _manual(self) -> ManualOptimization:
        return self.trainer.manual_optimization


def _plain(optimizer: ManualOptimizer | Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, ManualOptimizer) else optimizer


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items

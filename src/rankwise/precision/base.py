"""`Precision`: the hooks of a precision plug-in, and what `"32-true"` does in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

__all__ = ["Precision"]


class Precision:
    """Compute in the formats that the module's own parameters have: 32-bit, unless the user chose others.

    Subclass it for other formats, and pass an instance as `Trainer(plugins=[MyPrecision()])` or
    `DDPStrategy(precision=MyPrecision())`.

    Attributes:
        name: what the precision is called in `Trainer(precision="...")`.
    """

    name: ClassVar[str] = "32-true"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return `module` with its parameters in this precision; called before it is wrapped."""
        return module

    def configure(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Adapt module and optimizers to each other, once both exist (for master weights, say)."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a step's forward pass runs."""
        return nullcontext()

    def convert_input(self, batch: Any) -> Any:
        """Return `batch` in the format that the forward pass takes."""
        return batch

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of `loss`."""
        loss.backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Let `optimizer` update its parameters once; return what its `step` returns."""
        return optimizer.step() if closure is None else optimizer.step(closure)

    def clip_gradients_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all the optimizer's parameters so that their common norm is `max_norm`.

        Returns:
            The norm before clipping.
        """
        return clip_grad_norm_(self.main_parameters(optimizer), max_norm, norm_type)

    def clip_gradients_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every gradient of the optimizer's parameters to `[-clip_value, clip_value]`."""
        clip_grad_value_(self.main_parameters(optimizer), clip_value)

    def main_parameters(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Return the parameters that `optimizer` updates, which are those whose gradients are clipped."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of this precision; plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

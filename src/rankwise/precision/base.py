"""`Precision`: the hooks of a precision plug-in, and what `"32-true"` does in each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
        device_type: where this rank computes, `"cpu"` or `"cuda"`; the strategy sets it.
        agree: makes a yes of any rank everybody's. The strategy sets it where the ranks' gradients may differ
            after a backward pass; None where they are the same, and no rank has to be asked.
        has_skipped_step: whether the last `optimizer_step` left the weights as they were.
    """

    name: str = "32-true"
    device_type: str = "cpu"
    agree: Callable[[bool], bool] | None = None
    has_skipped_step: bool = False

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are scaled, so that some may overflow without the loss being at fault."""
        return False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return `module` with its parameters in this precision; called before it is wrapped."""
        return module

    def prepare_to_load(self, module: nn.Module) -> None:
        """Make a module ready to take a checkpoint's weights without losing digits."""

    def configure(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Adapt module and optimizers to each other, once both exist (for master weights, say).

        Called again, with the same or with new optimizers, where training goes on.
        """

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a step's forward pass runs."""
        return nullcontext()

    def convert_input(self, batch: Any) -> Any:
        """Return `batch` in the format that the forward pass takes."""
        return batch

    def convert_output(self, output: Any) -> Any:
        """Return what a forward pass gave in the format that the rest of the program takes: predictions."""
        return output

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of `loss`; `options` are those of `Tensor.backward`."""
        loss.backward(**options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Give `main_parameters` their gradients in true size; once is enough, and twice does no harm."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Let `optimizer` update its parameters once; return what its `step` returns."""
        return optimizer.step() if closure is None else optimizer.step(closure)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients of the optimizer's parameters."""
        optimizer.zero_grad()

    def clip_gradients_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all the optimizer's parameters so that their common norm is `max_norm`.

        Args:
            optimizer: whose gradients; they are unscaled first.
            max_norm: the norm that they may have at most.
            norm_type: the p of the norm, `inf` for the largest value.

        Returns:
            The norm before clipping.
        """
        self.unscale_gradients(optimizer)
        return clip_grad_norm_(self.main_parameters(optimizer), max_norm, norm_type)

    def clip_gradients_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every gradient of the optimizer's parameters to `[-clip_value, clip_value]`, unscaled."""
        self.unscale_gradients(optimizer)
        with_gradients = [one for one in self.main_parameters(optimizer) if one.grad is not None]
        if with_gradients:  # torch's function raises for none
            clip_grad_value_(with_gradients, clip_value)

    def main_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters that `optimizer` updates, which are those whose gradients are clipped."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def model_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the module's parameters that `optimizer` updates, be it through copies of them."""
        return self.main_parameters(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of this precision; plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what belongs to a job."""
        return {name: value for name, value in self.__dict__.items() if name != "agree"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

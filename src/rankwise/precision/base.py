"""`Precision`: the hooks of a precision plug-in, with the implementation of `"32-true"`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from rankwise.errors import InvalidTypeError, UnknownNameError
from rankwise.nested import map_tensors

T = TypeVar("T")
Closure = Callable[[], Any]
"""Computes gradients; returns the loss."""

_NOTHING = nullcontext()


class Precision:
    """Computes in the dtypes of the module's own parameters, usually 32-bit.

    Subclass it for other formats, and pass an instance as `Trainer(plugins=[MyPrecision()])` or
    `DDPStrategy(precision=MyPrecision())`.

    Attributes:
        name: the name for `Trainer(precision="...")`.
        device_type: this rank's, `"cpu"` or `"cuda"`; the strategy sets it.
        agree: returns on every rank whether any rank has passed True. The strategy sets it if the ranks'
            gradients may differ after a backward pass; None if they are the same.
        has_skipped_step: whether the last `optimizer_step` did not change the weights.
    """

    name: str = "32-true"
    device_type: str = "cpu"
    agree: Callable[[bool], bool] | None = None
    has_skipped_step: bool = False

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are scaled, so that they may overflow although the loss is finite."""
        return False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return `module` with its parameters in this precision; called before it is wrapped."""
        return module

    def prepare_to_load(self, module: nn.Module) -> None:
        """Prepare a module to load a checkpoint's weights without rounding them."""

    def reload_weights(self) -> None:
        """Take over weights that were loaded into the module, where the optimizers have copies of them."""

    def configure(
        self, module: nn.Module, optimizers: list[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]] | None:
        """Adapt the module and its optimizers to each other, for example for master weights.

        Called again, with the same or with new optimizers, when training continues.

        Returns:
            None, or this module and the optimizers to use instead, as many as were given. An optimizer that
            a learning rate scheduler changes cannot be replaced, and neither can the module.
        """
        return None

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a step's forward pass runs."""
        return _NOTHING

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which a module's parameters are created in the dtype that training keeps."""
        return _NOTHING

    def convert_input(self, batch: Any) -> Any:
        """Return `batch` in the format of the forward pass."""
        return batch

    def convert_output(self, output: Any) -> Any:
        """Return the output of a forward pass, such as predictions, in the program's usual format."""
        return output

    def backward(self, loss: Tensor, *, run: Callable[..., None] = Tensor.backward, **options: Any) -> None:
        """Compute gradients of `loss`, scaled if this precision does that, with `run(loss, **options)`."""
        run(loss, **options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `main_parameters` by the scale; a second call does nothing."""

    def scale_gradients(self) -> None:
        """Undo `unscale_gradients` where no step has followed, before gradients are added or saved."""

    def optimizer_step(self, optimizer: Optimizer, closure: Closure | None = None, **options: Any) -> Any:
        """Step the optimizer, with the `options` of its own `step`; return its result."""
        return optimizer.step(**options) if closure is None else optimizer.step(closure, **options)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Remove the gradients of the optimizer's parameters, or fill them with zeros."""
        optimizer.zero_grad(**({} if set_to_none else {"set_to_none": False}))  # users' own may take none

    def clip_gradients_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Limit the total norm of the gradients of the optimizer's parameters to `max_norm`.

        Args:
            optimizer: its gradients are unscaled first.
            max_norm: the limit.
            norm_type: the p of the norm, `inf` for the largest value.

        Returns:
            The norm before clipping.
        """
        self.unscale_gradients(optimizer)
        parameters = self.main_parameters(optimizer)
        norm = self._total_norm(gradient_values(parameters), norm_type)
        clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _total_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        return get_total_norm(gradients, norm_type)

    def clip_gradients_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Unscale the optimizer's gradients, and clamp them to `[-clip_value, clip_value]`."""
        self.unscale_gradients(optimizer)
        if values := gradient_values(self.main_parameters(optimizer)):  # torch's functions raise for none
            torch._foreach_clamp_min_(values, -clip_value)
            torch._foreach_clamp_max_(values, clip_value)

    def main_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters that `optimizer` updates, whose gradients are clipped."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def model_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the module's parameters that `optimizer` updates, directly or as copies."""
        return self.main_parameters(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; plain types and tensors only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; an empty dictionary stands for the initial state."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `agree`, which belongs to a job."""
        return {name: value for name, value in self.__dict__.items() if name != "agree"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def configured_optimizers(
    precision: Precision, module: nn.Module, optimizers: list[Optimizer]
) -> list[Optimizer]:
    """Call `precision.configure`; return the optimizers to use, checked."""
    match returned := precision.configure(module, optimizers):
        case None:
            return optimizers
        case [own, [*others]] if own is module and len(others) == len(optimizers):
            if all(isinstance(each, Optimizer) for each in others):
                return others
    expected = "None, or (module, optimizers): the same module, and as many optimizers as were given"
    raise InvalidTypeError(argument="Precision.configure()", value=returned, expected=expected)


class DtypePrecision(Precision):
    """Computes in one dtype: the input and new tensors have it; the output gets torch's default dtype."""

    dtypes: ClassVar[Mapping[str, torch.dtype]]  # by name

    def __init__(self, name: str) -> None:
        if name not in self.dtypes:
            raise UnknownNameError(kind="precision", name=name, known=tuple(self.dtypes))
        self.name = name
        self.dtype = self.dtypes[name]

    def forward_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.dtype)

    def convert_input(self, batch: Any) -> Any:
        return floats_to(batch, self.dtype)

    def convert_output(self, output: Any) -> Any:
        return floats_to(output, torch.get_default_dtype())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default dtype in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of `parameters`: of a sparse one its values, coalesced; nothing of empty ones.

    Mutates: `parameter.grad` of sparse gradients; writing to the tensors changes the gradients.
    """
    values = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = coalesced = gradient.coalesce()
            gradient = coalesced._values()
        if gradient is not None and gradient.numel():
            values.append(gradient)
    return values


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether no element is infinite or NaN; synchronises with the device once."""
    # The largest magnitude: unlike a sum of squares it cannot overflow.
    return bool(get_total_norm(gradients, float("inf")).isfinite()) if gradients else True


def floats_to(batch: T, dtype: torch.dtype) -> T:
    """Return a batch with its floating-point tensors converted to `dtype`."""
    converted: T = map_tensors(
        batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
    return converted

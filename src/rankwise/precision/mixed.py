"""`MixedPrecision`: 32-bit parameters, and forward passes under `torch.autocast`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.precision.base import Precision
from rankwise.precision.loss_scaling import dtype_and_scaler

__all__ = ["MixedPrecision"]

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@final
class MixedPrecision(Precision):
    """Run forward passes under `torch.autocast`; with float16, scale the loss.

    Args:
        name: `"16-mixed"` or `"bf16-mixed"`.
        scaler: for `"16-mixed"`: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`.

    Raises:
        UnknownNameError: for an unknown name.
        UnknownArgumentError, InvalidArgumentError: for invalid scaler options.
    """

    def __init__(self, name: str = "bf16-mixed", **scaler: Any) -> None:
        self.name = name
        self.dtype, self._scaler = dtype_and_scaler(name, _DTYPES, scaler)

    @property
    def scales_loss(self) -> bool:
        """Whether the format is float16."""
        return self._scaler is not None

    def configure(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self._scaler is not None:
            self._scaler.configure(optimizers)

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def convert_output(self, output: Any) -> Any:
        default = torch.get_default_dtype()
        return apply_to_collection(
            output, Tensor, lambda tensor: tensor.to(default) if tensor.dtype is self.dtype else tensor
        )

    def backward(self, loss: Tensor, **options: Any) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale(optimizer, self)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if self._scaler is None:
            result = super().optimizer_step(optimizer, closure)
        else:
            result = self._scaler.step(optimizer, self, closure)
        torch.clear_autocast_cache()  # a step under autocast (manual optimisation) leaves old weights in it
        return result

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict.get("scaler", {}))

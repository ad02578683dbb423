"""`MixedPrecision`: 32-bit parameters, and forward passes under `torch.autocast`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from rankwise.precision.loss_scaling import ScaledPrecision

__all__ = ["MixedPrecision"]


@final
class MixedPrecision(ScaledPrecision):
    """Run forward passes under `torch.autocast`; with float16, scale the loss.

    Args:
        name: `"16-mixed"` or `"bf16-mixed"`.
        scaler: for `"16-mixed"`: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`.

    Raises:
        UnknownNameError: for an unknown name.
        UnknownArgumentError, InvalidArgumentError: for invalid scaler options.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

    def __init__(self, name: str = "bf16-mixed", **scaler: Any) -> None:
        super().__init__(name, **scaler)

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def convert_output(self, output: Any) -> Any:
        default = torch.get_default_dtype()
        return apply_to_collection(
            output, Tensor, lambda tensor: tensor.to(default) if tensor.dtype is self.dtype else tensor
        )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if self._scaler is None:
            result = super().optimizer_step(optimizer, closure)
        else:
            result = self._scaler.step(optimizer, self, closure)
        torch.clear_autocast_cache()  # a step under autocast (manual optimisation) leaves old weights in it
        return result

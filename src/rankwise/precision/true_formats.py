"""`HalfPrecision` and `DoublePrecision`: parameters, data and computation in one format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from rankwise.errors import UnknownNameError
from rankwise.precision.base import Precision

__all__ = ["DoublePrecision", "HalfPrecision", "default_dtype", "floats_to"]

T = TypeVar("T")
_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default dtype in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def floats_to(batch: T, dtype: torch.dtype) -> T:
    """Return a batch with its floating-point tensors converted to `dtype`."""
    converted: T = apply_to_collection(
        batch,
        Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        allow_frozen=True,
    )
    return converted


class _TrueFormat(Precision):
    """Parameters, data and computation in one dtype."""

    dtype: torch.dtype

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers, in place."""
        return module.to(self.dtype)

    def prepare_to_load(self, module: nn.Module) -> None:
        """Convert the module, which would otherwise round a checkpoint of 64-bit weights."""
        self.convert_module(module)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have this dtype."""
        return default_dtype(self.dtype)

    def convert_input(self, batch: Any) -> Any:
        return floats_to(batch, self.dtype)

    def convert_output(self, output: Any) -> Any:
        return floats_to(output, torch.get_default_dtype())


@final
class HalfPrecision(_TrueFormat):
    """Everything in 16 bits, which halves the memory; small updates are rounded away.

    `MasterWeightsPrecision` keeps small updates.

    Args:
        name: `"16-true"` or `"bf16-true"`.

    Raises:
        UnknownNameError: for an unknown name.
    """

    def __init__(self, name: str = "16-true") -> None:
        if name not in _DTYPES:
            raise UnknownNameError(kind="precision", name=name, known=tuple(_DTYPES))
        self.name = name
        self.dtype = _DTYPES[name]


@final
class DoublePrecision(_TrueFormat):
    """Everything in 64 bits."""

    name = "64-true"
    dtype = torch.float64

    def convert_output(self, output: Any) -> Any:
        """Return predictions without rounding them."""
        return output

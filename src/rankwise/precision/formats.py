"""The built-in precisions, by name: `create_precision`; and those without master weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.compatibility.names import OTHER_PRECISIONS
from rankwise.errors import UnknownNameError
from rankwise.nested import map_tensors
from rankwise.precision.base import DtypePrecision, Precision
from rankwise.precision.loss_scaling import ScaledPrecision
from rankwise.precision.master_weights import MasterWeightsPrecision


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

    def convert_input(self, batch: Any) -> Any:
        return batch

    def convert_output(self, output: Any) -> Any:
        default = torch.get_default_dtype()
        return map_tensors(
            output, lambda tensor: tensor.to(default) if tensor.dtype is self.dtype else tensor
        )

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, **options)
        torch.clear_autocast_cache()  # a step under autocast (manual optimisation) leaves old weights in it
        return result


class _TrueFormat(DtypePrecision):
    """Parameters, data and computation in one dtype."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers, in place."""
        return module.to(self.dtype)

    def prepare_to_load(self, module: nn.Module) -> None:
        """Convert the module, which would otherwise round a checkpoint of 64-bit weights."""
        self.convert_module(module)


@final
class HalfPrecision(_TrueFormat):
    """Everything in 16 bits, which halves the memory; small updates are rounded away.

    `MasterWeightsPrecision` keeps small updates.

    Args:
        name: `"16-true"` or `"bf16-true"`.

    Raises:
        UnknownNameError: for an unknown name.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"16-true": torch.float16, "bf16-true": torch.bfloat16}

    def __init__(self, name: str = "16-true") -> None:
        super().__init__(name)

    def _total_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        """Return the norm, computed in 32 bits: in 16 it may be infinite, or rounded."""
        norms = [torch.linalg.vector_norm(each, norm_type, dtype=torch.float32) for each in gradients]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


@final
class DoublePrecision(_TrueFormat):
    """Everything in 64 bits."""

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"64-true": torch.float64}

    def __init__(self) -> None:
        super().__init__("64-true")

    def convert_output(self, output: Any) -> Any:
        """Return predictions without rounding them."""
        return output


_PRECISIONS: dict[str, Callable[[], Precision]] = {"32-true": Precision, "64-true": DoublePrecision}
for _kind in (HalfPrecision, MixedPrecision, MasterWeightsPrecision):
    _PRECISIONS |= {name: functools.partial(_kind, name) for name in _kind.dtypes}
# Spellings that Lightning accepts too; there 16 means autocast.
_SPELLINGS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def create_precision(name: str | int) -> Precision:
    """Return the precision called `name`, such as `"bf16-mixed"`; 64, 32, 16 and `"bf16"` are names too.

    Raises:
        UnknownNameError: for an unknown name.
    """
    spelling = str(name).lower()
    known = _SPELLINGS.get(spelling, spelling)
    if known not in _PRECISIONS:
        meant = OTHER_PRECISIONS.get(spelling)
        remedy = f'precision="{meant}".' if meant else ""
        known_names = (*_PRECISIONS, *_SPELLINGS)
        raise UnknownNameError(kind="precision", name=str(name), known=known_names, remedy=remedy)
    return _PRECISIONS[known]()

"""Create a precision by its name."""

from __future__ import annotations

from collections.abc import Callable

from rankwise.errors import UnknownNameError
from rankwise.precision.base import Precision
from rankwise.precision.master_weights import MasterWeightsPrecision
from rankwise.precision.mixed import MixedPrecision
from rankwise.precision.true_formats import DoublePrecision, HalfPrecision

__all__ = ["create_precision"]

_PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "16-true": lambda: HalfPrecision("16-true"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-mixed": lambda: MixedPrecision("16-mixed"),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed"),
    "16-master": lambda: MasterWeightsPrecision("16-master"),
    "bf16-master": lambda: MasterWeightsPrecision("bf16-master"),
}
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
        raise UnknownNameError(kind="precision", name=str(name), known=(*_PRECISIONS, *_SPELLINGS))
    return _PRECISIONS[known]()

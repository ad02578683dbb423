"""The table of precision names."""

from __future__ import annotations

from rankwise.errors import UnknownNameError
from rankwise.precision.base import Precision

__all__ = ["create_precision"]

_PRECISIONS: dict[str, type[Precision]] = {Precision.name: Precision}
_SPELLINGS = {"32": Precision.name}


def create_precision(name: str | int) -> Precision:
    """Return the precision called `name`, such as `"32-true"` (also `32` and `"32"`).

    Raises:
        UnknownNameError: when no precision has that name.
    """
    spelling = str(name).lower()
    known = _SPELLINGS.get(spelling, spelling)
    if known not in _PRECISIONS:
        raise UnknownNameError(kind="precision", name=str(name), known=(*_PRECISIONS, *_SPELLINGS))
    return _PRECISIONS[known]()

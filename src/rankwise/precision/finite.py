"""Whether gradients are finite."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils import get_total_norm

__all__ = ["are_finite"]


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether no element is infinite or NaN; waits for the device once."""
    # The largest magnitude: unlike a sum of squares it does not overflow by itself.
    return bool(get_total_norm(gradients, float("inf")).isfinite()) if gradients else True

"""`FirstItems`: a sampler that ends early."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Sampler
from typing_extensions import final

__all__ = ["FirstItems"]


@final
class FirstItems(Sampler[Any]):
    """Yield the first `count` items of `sampler`."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler = sampler
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.sampler, self.count)

    def __len__(self) -> int:
        return min(self.count, len(self.sampler))

"""`FlatGradients`: the gradients of many parameters as few tensors, where they lie side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor
from typing_extensions import final

__all__ = ["FlatGradients"]


@final
class FlatGradients:
    """All gradients of some parameters, one tensor for those that share a memory which nothing else is in.

    With `gradient_as_bucket_view=True` these are the buckets of DDP: what is done to all gradients alike
    then takes one operation for each bucket.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._seen: list[Tensor] = []
        self._pieces: list[Tensor] = []

    def pieces(self) -> list[Tensor]:
        """Return tensors that make up the gradients, each element once."""
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        if len(gradients) != len(self._seen) or not all(map(is_, gradients, self._seen)):
            self._look_at(gradients)
        return self._pieces or gradients

    def _look_at(self, gradients: list[Tensor]) -> None:
        """Keep what the gradients are made of, if it is few pieces: others would be kept from being freed."""
        self._seen, self._pieces = [], []
        by_memory: dict[int, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_memory[gradient.untyped_storage().data_ptr()].append(gradient)
        if len(by_memory) < len(gradients) and all(map(_fill_their_memory, by_memory.values())):
            self._seen = gradients
            self._pieces = [_whole_memory(first) for first, *_ in by_memory.values()]


def _fill_their_memory(tensors: list[Tensor]) -> bool:
    """Return whether tensors that share a memory leave nothing of it out, and do not overlap."""
    if not all(each.layout is torch.strided and each.is_contiguous() for each in tensors):
        return False
    end = 0
    for tensor in sorted(tensors, key=lambda each: (each.storage_offset(), each.numel())):
        if tensor.dtype != tensors[0].dtype or tensor.storage_offset() != end:
            return False
        end += tensor.numel()
    return end * tensors[0].element_size() == tensors[0].untyped_storage().nbytes()


def _whole_memory(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())

"""Digests of tensors, by which ranks compare what they have without sending it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parameter import is_lazy

_WORD = 8  # bytes
_ROW = 1 << 12  # words that are summed up to one
_CHUNK = 1 << 22  # words that are multiplied at once, to limit memory


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a dense tensor's bits, dtype and shape, computed on its device.

    Each 64-bit word is multiplied by an odd number of its own, and the products are added modulo 2^64, so a
    change of one word always shows. It does not protect against changes that are made on purpose.
    """
    with torch.no_grad():
        data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = data.detach().contiguous().flatten().view(torch.uint8)
        words = pad(flat, (0, -flat.numel() % _WORD)).clone().view(torch.int64)
        while words.numel() > 1:
            words = _folded(words)
    number = int(words) if words.numel() else 0
    return f"{number % 2**64:016x} of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _folded(words: Tensor) -> Tensor:
    """Return the sums of rows of words times odd numbers."""
    odd = torch.arange(_ROW, device=words.device).mul_(0x9E3779B97F4A7C15 - 2**64).mul_(2).add_(1)
    rows = pad(words, (0, -words.numel() % _ROW)).view(-1, _ROW)
    return torch.cat([(part * odd).sum(dim=1) for part in rows.split(_CHUNK // _ROW)])


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor by name; without those that have no dense values."""
    return {
        name: digest_of(tensor)
        for name, tensor in tensors.items()
        if not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta
    }

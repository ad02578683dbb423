"""What must be the same on all ranks, as facts by name or digests of tensors, and where ranks differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parameter import is_lazy

_ORDER = "the order of the parameters"
# Of digests:
_WORD = 8  # bytes
_ROW = 1 << 12  # words that are summed up to one
_CHUNK = 1 << 22  # words that are multiplied at once, to limit memory


def facts_of_parameters(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a description of each parameter by name, and their order."""
    return {
        **{f"parameter {name!r}": described(each, each.requires_grad) for name, each in parameters.items()},
        _ORDER: ", ".join(parameters),
    }


def differences(facts: Sequence[Mapping[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the names whose values differ, with the ranks (positions in `facts`) that have each value."""
    names = dict.fromkeys(name for own in facts for name in own)
    found = {}
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(facts):
            ranks[own.get(name, "absent")].append(rank)
        if len(ranks) > 1:
            found[name] = {value: tuple(who) for value, who in ranks.items()}
    if any(name.startswith("parameter ") for name in found):
        found.pop(_ORDER, None)  # differs as a consequence
    return found


def described(parameter: Tensor, is_trained: bool) -> str:
    """Return dtype and shape of a parameter, and whether it is frozen."""
    shape = "not initialised" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype}, {shape}{'' if is_trained else ', frozen'}"


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

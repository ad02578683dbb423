"""Compare what must be the same on all ranks: facts by name, and digests of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parameter import is_lazy

_ORDER = "the order of the parameters"
_WORD = 4  # bytes, of what a digest sums up
_ROW = 1 << 12  # words that are summed up to one
_CHUNK = 1 << 16  # words that are multiplied at once: as many as fit into a processor's cache
_CHUNK_OF_DEVICE = 1 << 22  # the same on an accelerator, to limit memory


def facts_of_parameters(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a description of each parameter by name, and their order."""
    return {
        **{f"parameter {name!r}": described(each, each.requires_grad) for name, each in parameters.items()},
        _ORDER: ", ".join(parameters),
    }


def ranks_by_value(values: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have each value; `values` are by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return {value: tuple(who) for value, who in ranks.items()}


def differences(facts: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the names whose values differ, with the ranks that have each value; `facts` are by rank."""
    names = dict.fromkeys(name for own in facts.values() for name in own)
    values = {
        name: ranks_by_value({rank: own.get(name, "absent") for rank, own in facts.items()}) for name in names
    }
    found = {name: ranks for name, ranks in values.items() if len(ranks) > 1}
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

    Each 32-bit word is multiplied by an odd number of its own, and the products are added modulo 2^64, so a
    change of one word always shows. It does not protect against changes that are made on purpose.
    """
    return f"{joint_digest([tensor])} of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def joint_digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of dense tensors, in their order.

    It takes one transfer for consecutive tensors of one device. Words are summed by `_CHUNK`, so that it
    takes the memory of a part of a tensor.
    """
    runs = groupby(tensors, attrgetter("device"))
    with torch.no_grad():
        return " ".join(f"{int(_sum_of(map(_words_of, run), device)) % 2**64:016x}" for device, run in runs)


def _words_of(tensor: Tensor) -> Tensor:
    """Return the 32-bit words of a tensor, with zeros at the end if its bytes do not fill the last one."""
    data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat, size = data.detach().contiguous().flatten(), data.element_size()
    if flat.numel() * size % _WORD or flat.storage_offset() * size % _WORD:
        flat = flat.view(torch.uint8)
        flat = pad(flat, (0, -flat.numel() % _WORD)).clone()
    return flat.view(torch.int32)


def _sum_of(pieces: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of a device's words times odd numbers; words of small tensors are summed together."""
    size = _CHUNK if device.type == "cpu" else _CHUNK_OF_DEVICE
    sums: list[Tensor] = []
    together: list[Tensor] = []
    length = 0
    for part in (part for piece in pieces for part in piece.split(size)):
        if length + part.numel() > size:
            sums.append(_folded(torch.cat(together)))
            together, length = [], 0
        together.append(part)
        length += part.numel()
    sums.append(_folded(torch.cat(together)))
    return _folded(torch.cat(sums))


def _folded(words: Tensor) -> Tensor:
    """Return one sum of words times odd numbers."""
    odd = _odd_numbers(words.device)
    while True:
        rows = pad(words, (0, -words.numel() % _ROW)).view(-1, _ROW) if words.numel() > _ROW else words[None]
        words = rows.to(torch.int64, copy=True).mul_(odd[: rows.shape[1]]).sum(dim=1)
        if words.numel() == 1:
            return words


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.arange(_ROW, device=device).mul_(0x9E3779B97F4A7C15 - 2**64).mul_(2).add_(1)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor by name; without tensors that have no dense values."""
    return {name: digest_of(tensor) for name, tensor in tensors.items() if has_values(tensor)}


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has dense values, so that it can have a digest."""
    # A class that dispatches operations itself, such as quantized weights, may not support the digest's.
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta

"""How a rank describes its tensor to the others: dtype and shape, and the bytes of a small one."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from typing_extensions import final

__all__ = ["INLINE_BYTES", "Description", "Frame"]

_MAX_DIMENSIONS = 64  # torch's own limit
_FACTS = struct.Struct("<4q")  # is it a tensor, dtype, bytes, number of dimensions; the dimensions follow
_HEADER_BYTES = _FACTS.size + _MAX_DIMENSIONS * 8
INLINE_BYTES = 4096
_FRAME_BYTES = _HEADER_BYTES + INLINE_BYTES

# dtypes by a number that does not depend on the order in which a version of torch defines them
_DTYPES = {
    zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


@final
@dataclass(frozen=True)
class Description:
    """What a rank wants to gather.

    Attributes:
        dtype: of its tensor; None where it has none.
        shape: of its tensor.
        num_bytes: of its tensor, or of the text that says what it has instead.
        instead: that text.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    num_bytes: int
    instead: str = ""

    def __str__(self) -> str:
        return self.instead or f"{self.dtype}, shape {self.shape}"


@final
class Frame:
    """A message of fixed size that describes a rank's tensor, and holds it if it is small.

    The header is written and read as plain memory: as operations on tensors that took longer than sending it.

    Attributes:
        memory: the bytes.
        tensor: the same memory, as bytes on the CPU.
    """

    def __init__(self) -> None:
        self.memory = bytearray(_FRAME_BYTES)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)

    @classmethod
    def of(cls, value: object) -> Frame:
        """Return the frame of a value."""
        frame = cls()
        if not (isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized):
            text = _what_it_is(value).encode()[:INLINE_BYTES]
            _FACTS.pack_into(frame.memory, 0, 0, 0, len(text), 0)
            frame.memory[_HEADER_BYTES : _HEADER_BYTES + len(text)] = text
            return frame
        num_bytes = value.numel() * value.element_size()
        _FACTS.pack_into(frame.memory, 0, 1, _NUMBERS[value.dtype], num_bytes, value.ndim)
        struct.pack_into(f"<{value.ndim}q", frame.memory, _FACTS.size, *value.shape)
        if 0 < num_bytes <= INLINE_BYTES:
            frame._held(value.dtype, value.shape).copy_(value.detach())
        return frame

    @cached_property
    def description(self) -> Description:
        """What the frame describes."""
        is_tensor, number, num_bytes, ndim = _FACTS.unpack_from(self.memory)
        if not is_tensor:
            text = bytes(self.memory[_HEADER_BYTES : _HEADER_BYTES + num_bytes])
            return Description(None, (), num_bytes, text.decode(errors="replace"))
        shape = struct.unpack_from(f"<{ndim}q", self.memory, _FACTS.size)
        return Description(_DTYPES[number], shape, num_bytes)

    def inline(self) -> torch.Tensor:
        """Return a copy of the small tensor that the frame holds."""
        dtype, shape = self.description.dtype, self.description.shape
        if dtype is None or self.description.num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        return self._held(dtype, shape).clone()

    def _held(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the memory of the small tensor, as one of this dtype and shape."""
        count = math.prod(shape)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=_HEADER_BYTES).view(shape)


def _what_it_is(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor that is not dense (layout {value.layout}, dtype {value.dtype})"
    return f"no tensor but {type(value).__name__}"

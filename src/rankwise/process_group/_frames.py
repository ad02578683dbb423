"""How a rank describes its tensor to the others: dtype and shape, and the bytes of a small one."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from typing_extensions import final

__all__ = ["INLINE_BYTES", "Description", "from_bytes", "packed", "unpacked"]

_MAX_DIMENSIONS = 64  # torch's own limit
_WORDS = 4 + _MAX_DIMENSIONS  # is it a tensor, dtype, bytes, number of dimensions, dimensions
_HEADER_BYTES = _WORDS * 8
INLINE_BYTES = 4096
_FRAME_BYTES = _HEADER_BYTES + INLINE_BYTES

# dtypes by a number that does not depend on the order in which a version of torch defines them
_DTYPES = {
    zlib.crc32(str(dtype).encode()): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


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


def packed(value: object) -> torch.Tensor:
    """Return the frame of a value, as bytes on the CPU."""
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
    header = frame[:_HEADER_BYTES].view(torch.int64)
    if not (isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized):
        text = _what_it_is(value).encode()[:INLINE_BYTES]
        header[2] = len(text)
        frame[_HEADER_BYTES : _HEADER_BYTES + len(text)] = torch.frombuffer(
            bytearray(text), dtype=torch.uint8
        )
        return frame
    num_bytes = value.numel() * value.element_size()
    facts = [1, zlib.crc32(str(value.dtype).encode()), num_bytes, value.ndim, *value.shape]
    header[: len(facts)] = torch.tensor(facts)
    if 0 < num_bytes <= INLINE_BYTES:
        frame[_HEADER_BYTES : _HEADER_BYTES + num_bytes] = _as_bytes(value)
    return frame


def unpacked(frame: torch.Tensor) -> tuple[Description, torch.Tensor]:
    """Return what a frame describes, and the bytes that it has beside that."""
    inline = frame[_HEADER_BYTES:]
    is_tensor, dtype, num_bytes, ndim, *shape = frame[:_HEADER_BYTES].view(torch.int64).tolist()
    if not is_tensor:
        text = bytes(inline[:num_bytes].tolist()).decode(errors="replace")
        return Description(None, (), num_bytes, text), inline
    return Description(_DTYPES[dtype], tuple(shape[:ndim]), num_bytes), inline


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as bytes, without a copy where they lie together."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, description: Description) -> torch.Tensor:
    """Return the tensor that a description and its bytes stand for; a copy."""
    own = data[: description.num_bytes].clone()
    if description.dtype is None:
        return own
    return own.view(description.dtype).view(description.shape)


def _what_it_is(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor that is not dense (layout {value.layout}, dtype {value.dtype})"
    return f"no tensor but {type(value).__name__}"

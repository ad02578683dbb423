"""How the private store's questions and answers are written: length-prefixed bytes, never pickles."""

from __future__ import annotations

import struct
from collections.abc import Iterable

_COUNT = struct.Struct("!H")
_LENGTH = struct.Struct("!I")


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """Write several byte strings as one."""
    parts = list(fields)
    chunks = [_COUNT.pack(len(parts))]
    for part in parts:
        chunks += (_LENGTH.pack(len(part)), part)
    return b"".join(chunks)


def unpack_fields(data: bytes) -> list[bytes]:
    """Read back what `pack_fields` wrote.

    Raises:
        ValueError: when the bytes are not such a message.
    """
    try:
        (count,) = _COUNT.unpack_from(data)
        offset, fields = _COUNT.size, []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, offset)
            offset += _LENGTH.size
            fields.append(data[offset : offset + length])
            offset += length
    except struct.error as error:
        raise ValueError(f"not a message of the store: {error}") from None
    if offset != len(data):
        raise ValueError(f"not a message of the store: {len(data)} bytes, expected {offset}")
    return fields

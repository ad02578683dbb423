"""Shut TCP sockets that listen in this process, but are not Python's to close."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

# Not Python's sockets: they make one non-blocking where the program has set a default timeout.
_LIBC = ctypes.CDLL(None)
_OPEN_FILES = "/proc/self/fd"
# socket(7): Linux has them, and Python's module no name for the second one.
_ACCEPTS = getattr(socket, "SO_ACCEPTCONN", 0)
_DOMAIN, _ATTACH_FILTER = 39, 26
_TCP = (socket.AF_INET, socket.AF_INET6)
# A program of classic BPF, linux/filter.h: return 0, which drops each packet.
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)


def open_sockets() -> set[tuple[str, str]]:
    """Return descriptor and inode of each socket of this process; none without Linux."""
    found = set()
    with suppress(OSError):  # no Linux
        for descriptor in os.listdir(_OPEN_FILES):  # noqa: PTH208  a tenth of the time of a path each
            with suppress(OSError):  # closed meanwhile
                link = os.readlink(f"{_OPEN_FILES}/{descriptor}")  # noqa: PTH115  "socket:[1]" is not a path
                if link.startswith("socket:"):
                    found.add((descriptor, link))
    return found


def listening(sockets: Iterable[tuple[str, str]]) -> list[int]:
    """Return the descriptors of those that listen for TCP connections."""
    descriptors = [int(descriptor) for descriptor, _ in sockets]
    return [each for each in descriptors if _option(each, _ACCEPTS) and _option(each, _DOMAIN) in _TCP]


def shut(descriptors: Iterable[int]) -> None:
    """Let sockets take no further connection: the kernel drops requests for one. Existing ones stay."""
    program = ctypes.create_string_buffer(_DROP)
    description = struct.pack("HP", 1, ctypes.addressof(program))
    for descriptor in descriptors:
        # Where a sandbox refuses this, they listen on.
        _LIBC.setsockopt(descriptor, socket.SOL_SOCKET, _ATTACH_FILTER, description, len(description))


def _option(descriptor: int, option: int) -> int:
    """Return an option of a socket; 0 for other descriptors."""
    value, size = ctypes.c_int(0), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    _LIBC.getsockopt(descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size))
    return value.value

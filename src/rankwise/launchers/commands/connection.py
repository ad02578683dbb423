"""Connections between a rank and the launching process, each of which proves that it has the job's key.

A rank opens several; see `Purpose`. It imports this module before torch.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import asdict, dataclass
from enum import IntEnum, unique
from typing import NamedTuple, final

from rankwise.errors import PeerAuthenticationError
from rankwise.stores.values import decoded

_HASH = "sha256"
_CODE_BYTES = _NONCE_BYTES = 32
_CLOCK, _LENGTH, _SIZE = struct.Struct("!d"), struct.Struct("!H"), struct.Struct("!Q")
_HANDSHAKE_S = 30.0
_CHUNK = 1 << 20
# After how long a host that is gone is noticed: first by the launching process, which says so; the kernel of
# the rank's host kills the rank later.
_LOST_S, _ALONE_S = 30, 60
_PROBES = 3


@unique
class Purpose(IntEnum):
    """What a rank uses a connection for."""

    CHANNEL = 1  # its job and its entry come; then the frames of its channel
    LIFELINE = 2  # nothing: the kernel kills the rank when the launching process closes it
    VALUE = 3  # what the rank returns


@final
@dataclass(frozen=True)
class Introduction:
    """Which process of which rank has opened a connection, and for what."""

    purpose: int
    global_rank: int
    pid: int
    host: str


class Connection(NamedTuple):
    """A connection to the launching process, and its monotonic clock less this process's."""

    sock: socket.socket
    clock_offset_s: float


def connect(address: tuple[str, int], key: bytes, purpose: Purpose, global_rank: int) -> Connection:
    """Connect this rank to the launching process; raise `PeerAuthenticationError` if that lacks the key."""
    sock = socket.create_connection(address, _HANDSHAKE_S)
    try:
        return Connection(sock, _introduce(sock, key, purpose, global_rank))
    except BaseException:
        sock.close()
        raise


def _introduce(sock: socket.socket, key: bytes, purpose: Purpose, global_rank: int) -> float:
    own, began_s = secrets.token_bytes(_NONCE_BYTES), time.monotonic()
    sock.sendall(own)
    challenge = _receive(sock, _NONCE_BYTES + _CLOCK.size)
    now_s = time.monotonic()
    if not hmac.compare_digest(_code(key, b"launching process", own, challenge), _receive(sock, _CODE_BYTES)):
        where = "{}:{}".format(*sock.getpeername()[:2])
        raise PeerAuthenticationError(f"The process that listens at {where} does not have the job's key.")
    text = json.dumps(asdict(Introduction(purpose, global_rank, os.getpid(), socket.gethostname()))).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text + _code(key, b"rank", own, challenge, text))
    _keep_alive(sock, _ALONE_S)
    (clock_s,) = _CLOCK.unpack_from(challenge, _NONCE_BYTES)
    offset_s = clock_s - (began_s + now_s) / 2
    return offset_s if abs(offset_s) > now_s - began_s else 0.0  # else it may be one clock


def accept(sock: socket.socket, key: bytes) -> Introduction:
    """Return who has opened a connection. Runs on: the launching process.

    Raises:
        PeerAuthenticationError, ProcessGroupError, OSError, EOFError: when it was no rank of the job.
    """
    sock.settimeout(_HANDSHAKE_S)
    theirs = _receive(sock, _NONCE_BYTES)
    challenge = secrets.token_bytes(_NONCE_BYTES) + _CLOCK.pack(time.monotonic())
    sock.sendall(challenge + _code(key, b"launching process", theirs, challenge))
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    text = _receive(sock, length)
    if not hmac.compare_digest(_code(key, b"rank", theirs, challenge, text), _receive(sock, _CODE_BYTES)):
        raise PeerAuthenticationError(
            "A process without the job's key has connected to the launching process."
        )
    _keep_alive(sock, _LOST_S)
    return decoded(Introduction, text, "an introduction")


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Send a few bytes."""
    sock.sendall(_SIZE.pack(len(data)) + data)


def receive_bytes(sock: socket.socket) -> bytes:
    """Return what `send_bytes` has sent."""
    return _receive(sock, *_SIZE.unpack(_receive(sock, _SIZE.size)))


def send_file(sock: socket.socket, descriptor: int) -> None:
    """Send the contents of a memory file."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        sock.sendall(_SIZE.pack(os.fstat(descriptor).st_size))
        sock.sendfile(file)


def receive_file(sock: socket.socket, descriptor: int) -> None:
    """Write what `send_file` has sent into an empty memory file; raise `EOFError` if it is not complete."""
    (left,) = _SIZE.unpack(_receive(sock, _SIZE.size))
    with open(descriptor, "wb", closefd=False) as file:
        while left:
            if not (data := sock.recv(min(left, _CHUNK))):
                raise EOFError("the connection was closed")
            file.write(data)
            left -= len(data)


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            raise EOFError("the connection was closed")
        data += more
    return data


def _code(key: bytes, role: bytes, *parts: bytes) -> bytes:
    # All parts but the last have a fixed length.
    return hmac.digest(hmac.digest(key, role, _HASH), b"".join(parts), _HASH)


def _keep_alive(sock: socket.socket, limit_s: int) -> None:
    """Give a connection a time limit only for a host that does not answer: half of it idle, then probes."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": limit_s // 2,
        "TCP_KEEPINTVL": limit_s // 2 // _PROBES,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": 1000 * limit_s,  # for data that nobody confirms
    }
    for name, value in options.items():
        if name in vars(socket):  # macOS lacks some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

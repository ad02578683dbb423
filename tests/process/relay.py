"""A stranger who stands between two ranks on gloo: he relays what they send, reads it and changes it.

Run as `python relay.py FOLDER`: it writes its port to FOLDER/port, and what it reads to FOLDER/relayed.
"""

import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path

# A message of gloo: bytes in all, kind, slot, offset, bytes of data, offset there.
_HEADER = struct.Struct("=6Q")
_WITH_DATA = (0, 1)
_SEQUENCE_NUMBER_BYTES = 8
_FIRST_PORT = 20_000  # below those that the kernel chooses: gloo connects to the lower one
_FLOAT_BYTES = 4


def listener() -> socket.socket:
    """Return a socket at a port to which both ranks of a pair connect."""
    for port in range(_FIRST_PORT, 30_000):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise OSError("no port is free")


def take(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes."""
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise OSError("closed")
    return data


def accept(listening: socket.socket) -> socket.socket:
    """Accept a rank's connection, and take the number with which it begins."""
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    take(connection, _SEQUENCE_NUMBER_BYTES)
    return connection


def relay(source: socket.socket, target: socket.socket, folder: Path) -> None:
    """Pass messages on: codes unchanged, numbers changed."""
    with suppress(OSError):
        while True:
            header = take(source, _HEADER.size)
            size, kind, *_ = _HEADER.unpack(header)
            data = take(source, size - _HEADER.size) if kind in _WITH_DATA else b""
            with (folder / "relayed").open("ab") as file:
                file.write(data)
            if len(data) == _FLOAT_BYTES:
                data = struct.pack("f", struct.unpack("f", data)[0] + 100)
            target.sendall(header + data)
    for connection in (source, target):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def main(folder: Path) -> None:
    """Stand between the ranks that connect, two at a time."""
    listening = listener()
    (folder / "port.part").write_text(f"{listening.getsockname()[1]}")
    (folder / "port.part").rename(folder / "port")
    while True:
        ends = accept(listening), accept(listening)
        for source, target in (ends, ends[::-1]):
            threading.Thread(target=relay, args=(source, target, folder), daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A process that takes a rank's place in gloo: it connects to each port of a job, and sends a pickle.

Run as `python impostor.py PID FOLDER`: it attacks the descendants of a process until it is ended. It writes
the ports to FOLDER/connected, the messages of ranks that took it for another rank to FOLDER/taken, and what
they sent to FOLDER/read. The pickle makes the file FOLDER/code_was_run. With `ALL_PORTS` in the environment
it connects to all ports of its network namespace: another user cannot see which process has one.
"""

import contextlib
import os
import pickle
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEQUENCE_NUMBERS = 4  # of a rank's connections to the others, that are tried
# A message of gloo: bytes in all, kind, slot, offset, bytes of data, offset there.
_HEADER = struct.Struct("=6Q")
_DATA, _SENDER_IS_READY, _RECEIVER_IS_READY = 1, 2, 3
_LISTENING = "0A"


class MakesFile:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.path, "w")


def _ports(root: int) -> Iterator[int]:
    """Yield the ports at which a process and its descendants listen on loopback, or all."""
    if "ALL_PORTS" in os.environ:
        for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
            address, _, state = line.split()[1:4]
            if state == _LISTENING:
                yield int(address.rpartition(":")[2], 16)
        return
    import psutil  # which the interpreter of another user may lack

    for process in (main := psutil.Process(root), *main.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp4"):
                if each.status == psutil.CONN_LISTEN:
                    yield each.laddr.port


class Impostor:
    """Speaks gloo with whoever takes it for a rank."""

    def __init__(self, root: int, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._pickle = pickle.dumps(MakesFile(str(folder / "code_was_run")))
        self._tried: set[int] = set()
        self._buffers: dict[socket.socket, bytearray] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        parent = os.getppid()
        self._write("ready", "")
        while os.getppid() == parent:
            for port in _ports(self._root):
                if port not in self._tried:
                    self._tried.add(port)
                    self._connect(port)
            for key, _ in self._selector.select(0.001):
                self._receive(key.fileobj)  # type: ignore[arg-type]  # a socket

    def _connect(self, port: int) -> None:
        for number in range(SEQUENCE_NUMBERS):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 1)
                connection.sendall(struct.pack("=q", number))
                connection.setblocking(False)
                self._buffers[connection] = bytearray()
                self._selector.register(connection, selectors.EVENT_READ)
        self._write("connected", f"{port}")

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            return
        buffer = self._buffers[connection]
        buffer += data
        with contextlib.suppress(OSError):
            while len(buffer) >= _HEADER.size:
                total, kind, slot, _, length, _ = _HEADER.unpack_from(buffer)
                end = total if kind == _DATA else _HEADER.size
                if len(buffer) < end:
                    return
                self._answer(connection, kind, slot, length, bytes(buffer[_HEADER.size : end]))
                del buffer[:end]

    def _answer(self, connection: socket.socket, kind: int, slot: int, length: int, data: bytes) -> None:
        self._write("taken", f"{kind} {length}")
        if "SILENT" in os.environ:
            return
        if kind == _DATA:
            self._write("read", repr(data[:200]))
        elif kind == _SENDER_IS_READY:
            connection.sendall(_HEADER.pack(_HEADER.size, _RECEIVER_IS_READY, slot, 0, length, 0))
        elif kind == _RECEIVER_IS_READY:
            data = self._pickle
            if length != len(data):  # a size, and then what has it
                data = (struct.pack("=q", len(data)) + data).ljust(length, b"\0")[:length]
            connection.sendall(_HEADER.pack(_HEADER.size + length, _DATA, slot, 0, length, 0) + data)

    def _write(self, name: str, line: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(f"{time.monotonic():.3f} {line}\n")


if __name__ == "__main__":
    Impostor(int(sys.argv[1]), Path(sys.argv[2])).run()

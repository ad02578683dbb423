"""`RankServer`: where ranks that run anywhere connect to the launching process."""

from __future__ import annotations

import pickle
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import final

from rankwise.errors import LaunchRefusedError, PeerAuthenticationError, ProcessGroupError
from rankwise.launchers.commands.connection import (
    Introduction,
    Purpose,
    RemoteJob,
    accept,
    receive_file,
    send_bytes,
    send_file,
)
from rankwise.launchers.commands.process import SupervisedCommand
from rankwise.launchers.worker_group import WorkerLinks
from rankwise.processes import fork_safety
from rankwise.processes.memory_file import Descriptor

_CHUNK = 1 << 16
_LOST_CONNECTION = (
    "its process runs, as far as is known, but its connection is lost: its host or the network is down"
)


@final
class RankLink:
    """The connections of one rank, and the way from them to the supervisor's socket and memory file."""

    def __init__(
        self, global_rank: int, job: RemoteJob, entry: Descriptor, links: WorkerLinks, timeout: timedelta
    ) -> None:
        self.process = SupervisedCommand(global_rank, links.parent_pipe, self.cut)
        self.process.lost_channel = (
            f"it has not connected to the launching process within {timeout.total_seconds():g} s"
        )
        self._job, self._entry, self._values = job, entry, links.values
        self._local = links.channel.dup()  # the other end is the supervisor's
        fork_safety.close_in_child(self._local)
        self._lock = threading.Lock()
        self._sockets: dict[Purpose, socket.socket] = {}
        self._is_cut = False
        self._timer = threading.Timer(timeout.total_seconds(), self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def take(self, introduction: Introduction, sock: socket.socket) -> None:
        """Use a connection of the rank, until it is closed."""
        purpose = Purpose(introduction.purpose)
        with self._lock:
            if self._is_cut or purpose in self._sockets:
                return
            self._sockets[purpose] = sock
        if purpose is Purpose.VALUE:
            receive_file(sock, self._values.number)
            sock.sendall(b"\1")
        elif purpose is Purpose.LIFELINE:
            sock.recv(1)
        else:
            self._timer.cancel()
            self.process.pid, self.process.host = introduction.pid, introduction.host
            self._serve_channel(sock)

    def _serve_channel(self, sock: socket.socket) -> None:
        self.process.is_connected = True
        self.process.lost_channel = _LOST_CONNECTION
        outgoing = threading.Thread(target=self._serve_supervisor, args=(sock,), daemon=True)
        try:
            send_bytes(sock, pickle.dumps(self._job))
            send_file(sock, self._entry.number)
            outgoing.start()
            _forward(sock, self._local)
        finally:
            self.process.wait_after_channel()
            _shut(self._local)

    def _serve_supervisor(self, sock: socket.socket) -> None:
        _forward(self._local, sock)
        _shut(sock)

    def _give_up(self) -> None:
        if not self.process.is_connected:
            _shut(self._local)

    def cut(self) -> None:
        """Close the lifeline, which kills the rank, and take no more connections."""
        with self._lock:
            self._is_cut = True
            if (lifeline := self._sockets.get(Purpose.LIFELINE)) is not None:
                _shut(lifeline)

    def close(self) -> None:
        """Close all connections."""
        self._timer.cancel()
        self.cut()
        with self._lock:
            for sock in self._sockets.values():
                _shut(sock)
        _shut(self._local)
        self._local.close()


@final
class RankServer:
    """Accept connections of the ranks, each in a thread."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._key = key
        self._links: dict[int, RankLink] = {}
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise LaunchRefusedError(
                message=f"The launching process cannot listen at {address[0]}:{address[1]}: {error}.",
                remedy="CommandLauncher(start, address=...) with an address of this host, and a free port.",
            ) from None
        fork_safety.close_in_child(self._listener)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="rankwise-ranks", daemon=True).start()

    def expect(self, global_rank: int, link: RankLink) -> None:
        """Give the connections of a rank to a link."""
        self._links[global_rank] = link

    def _listen(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                sock, _ = self._listener.accept()
                fork_safety.close_in_child(sock)
                threading.Thread(target=self._serve, args=(sock,), name="rankwise-rank", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        # A stranger may connect too, and a rank may be killed at any time: its end is reported elsewhere.
        with sock, suppress(OSError, EOFError, KeyError, PeerAuthenticationError, ProcessGroupError):
            introduction = accept(sock, self._key)
            self._links[introduction.global_rank].take(introduction, sock)

    def close(self) -> None:
        """Close everything; the ranks' processes must have ended."""
        _shut(self._listener)
        self._listener.close()
        for link in self._links.values():
            link.close()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)


def _shut(sock: socket.socket) -> None:
    """End a connection; closing it would not wake the threads that wait for it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

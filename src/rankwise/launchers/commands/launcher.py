"""`CommandLauncher`: a function of the user starts a command for each rank, which connects here."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import spawn
from typing import Any, ClassVar, final

from rankwise.checks import check_callable, check_is_a, check_value
from rankwise.environments.network import LOOPBACK, is_loopback, is_own_loopback_name
from rankwise.errors import (
    ConfigurationError,
    InvalidTypeError,
    LaunchRefusedError,
    PeerAuthenticationError,
    ProcessGroupError,
    text_of,
)
from rankwise.launchers import preconditions
from rankwise.launchers.commands import connection
from rankwise.launchers.commands import worker as worker_module
from rankwise.launchers.commands.connection import Introduction, Purpose
from rankwise.launchers.commands.process import CommandProcess, SupervisedCommand
from rankwise.launchers.context import Entry, Launcher, WorkerContext
from rankwise.launchers.multiprocess import create_job, run_job
from rankwise.launchers.script_place import count_launch
from rankwise.launchers.supervisor import SupervisionOptions
from rankwise.launchers.worker_group import WorkerGroup, WorkerLinks
from rankwise.launchers.worker_main import JobSpec
from rankwise.processes import fork_safety
from rankwise.processes.memory_file import Descriptor
from rankwise.ranks import RankInfo
from rankwise.start import JOB_KEY
from rankwise.stores.sealed import job_key_of_environment

_HIGHEST_PORT = 65535
_CHUNK = 1 << 16
_LOST_CONNECTION = (
    "its process runs, as far as is known, but its connection is lost: its host or the network is down"
)

Start = Callable[[list[str], dict[str, str], int], CommandProcess]


@final
@dataclass(eq=False)
class CommandLauncher(Launcher):
    """Start each rank by a command, with a function that knows how to start a command somewhere.

    The launching process is not a rank. It supervises all of them over connections that they open to it, so
    that failures, signals and its own end have the same effects as with processes on this machine.

    Args:
        start: called as `start(command, environment, global_rank)` for each rank, in order. It starts the
            command with these variables added to the ones of its host, and returns an object with `wait()`
            and `kill()`, such as a `subprocess.Popen`. The variables hold the key of the job: they must not
            be on a command line, where other users can read them.
        address: of this host, where the ranks reach it; by default loopback.
        port: the port there; by default one that the kernel chooses.

    Raises:
        InvalidArgumentError, InvalidTypeError: for impossible values.
    """

    copies_entry = True
    has_channels = True
    start_method: ClassVar[str] = "command"

    start: Start
    address: str = LOOPBACK
    port: int = 0

    def __post_init__(self) -> None:
        check_callable("start", self.start, "a function start(command, environment, global_rank)")
        check_is_a("address", self.address, str)
        check_is_a("port", self.port, int)
        check_value("port", self.port, 0 <= self.port <= _HIGHEST_PORT, f"0 to {_HIGHEST_PORT}")

    def bound_to(self, ranks: tuple[RankInfo, ...], options: SupervisionOptions) -> Launcher:
        """Return a copy for these ranks; raise `ConfigurationError` if other nodes cannot reach this one."""
        if not ranks[0].is_one_node and (is_loopback(self.address) or is_own_loopback_name(self.address)):
            raise ConfigurationError(
                message=f"The ranks of {ranks[0].num_nodes} nodes cannot reach the launching process at "
                f"address={self.address!r}, which is loopback.",
                remedy="CommandLauncher(start, address=...), an address of this host that all nodes reach.",
            )
        return super().bound_to(ranks, options)

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Start, run, collect the values; see `Launcher.launch`."""
        count_launch()
        preconditions.refuse_patched_threads()
        preconditions.refuse_removed_directory()
        preconditions.refuse_while_main_is_imported(self.start_method)
        started_s = time.monotonic()
        with ExitStack() as cleanup:
            with preconditions.shortages_named(len(self.all_ranks)):
                job = create_job(self.start_method, entry, described, cleanup)
                key = job_key_of_environment() or secrets.token_hex(32).encode()
                server = RankServer((self.address, self.port), key)
                cleanup.callback(server.close)
                group = WorkerGroup(self.all_ranks, self.options, job=1)
                cleanup.callback(group.close)
                group.open_rendezvous(rendezvous, self.address)
                group.start(self.all_ranks, partial(self._start_rank, job, server, os.fsdecode(key)))
                group.supervisor.start()
            return run_job(group, started_s)

    def _start_rank(
        self, job: JobSpec, server: RankServer, key: str, worker: WorkerContext, links: WorkerLinks
    ) -> SupervisedCommand:
        rank = worker.ranks.global_rank
        worker.supervisor_host = self.address
        if not isinstance(job.entry, Descriptor):
            raise TypeError(f"{job.entry!r} is not packed")
        preparation = spawn.get_preparation_data(f"rankwise-{rank}")
        preparation["authkey"] = bytes(preparation["authkey"])  # of a type that refuses to be pickled here
        data = pickle.dumps((worker, preparation))  # all of it is rankwise's or Python's own
        link = RankLink(rank, data, job.entry, links, self.options.init_timeout)
        server.links[rank] = link
        command = [sys.executable, "-m", worker_module.__name__, self.address, str(server.port), str(rank)]
        link.process.watch(self._started(command, {JOB_KEY: key}, rank))
        return link.process

    def _started(self, command: list[str], environment: dict[str, str], rank: int) -> CommandProcess:
        try:
            process = self.start(command, environment, rank)
        except Exception as error:
            raise LaunchRefusedError(
                message=f"start() of global_rank={rank} raised {type(error).__name__}: {text_of(error)}",
                remedy="the function that was given to CommandLauncher has to start the command.",
            ) from error
        if not all(callable(getattr(process, method, None)) for method in ("wait", "kill")):
            expected = "it to return an object with wait() and kill(), such as subprocess.Popen"
            raise InvalidTypeError(argument="start()", value=process, expected=expected)
        return process


@final
class RankLink:
    """The connections of one rank, and the way from them to the supervisor's socket and memory file."""

    def __init__(
        self, global_rank: int, data: bytes, entry: Descriptor, links: WorkerLinks, timeout: timedelta
    ) -> None:
        timeout_s = timeout.total_seconds()
        self.process = SupervisedCommand(global_rank, links.parent_pipe, self.cut)
        self.process.lost_channel = f"it has not connected to the launching process within {timeout_s:g} s"
        self._data, self._entry, self._values = data, entry, links.values
        self._local = links.channel.dup()  # the other end is the supervisor's
        fork_safety.close_in_child(self._local)
        self._lock = threading.Lock()
        self._sockets: dict[Purpose, socket.socket] = {}
        self._is_cut = False
        self._timer = threading.Timer(timeout_s, self._give_up)
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
            connection.receive_file(sock, self._values.number)
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
            connection.send_bytes(sock, self._data)
            connection.send_file(sock, self._entry.number)
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
    """Accept connections of the ranks, each in a thread; give each to the link of its rank."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._key = key
        self.links: dict[int, RankLink] = {}  # by global rank
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

    def _listen(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                sock, _ = self._listener.accept()
                fork_safety.close_in_child(sock)
                threading.Thread(target=self._serve, args=(sock,), name="rankwise-rank", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        # A stranger may connect too, and a rank may be killed at any time: its end is reported elsewhere.
        with sock, suppress(OSError, EOFError, KeyError, PeerAuthenticationError, ProcessGroupError):
            introduction = connection.accept(sock, self._key)
            self.links[introduction.global_rank].take(introduction, sock)

    def close(self) -> None:
        """Close everything; the ranks' processes must have ended."""
        _shut(self._listener)
        self._listener.close()
        for link in self.links.values():
            link.close()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)


def _shut(sock: socket.socket) -> None:
    """End a connection; closing it would not wake the threads that wait for it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

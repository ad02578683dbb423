"""`SupervisedLauncher`: start the local ranks by a `WorkerStarter`, supervise them, end them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.failures.exchange import CrossNodeFailures
from rankwise.launchers.base import Launcher
from rankwise.launchers.supervisor import SupervisionOptions, Supervisor
from rankwise.monitoring.heartbeat import HeartbeatReader
from rankwise.processes import fork_safety
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.shared_memory import create_memory_file
from rankwise.processes.signals import interrupts_blocked
from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo
from rankwise.stores.tcp import host_store, hosted_store

if TYPE_CHECKING:
    from torch.distributed import Store


@final
@dataclass(frozen=True)
class WorkerLinks:
    """What connects a worker to the launching process.

    Attributes:
        channel: the worker's end of its channel.
        values: the memory file for what it returns.
        heartbeat: the memory file for its phase.
        parent_pipe: ends the worker when the launching process ends.
    """

    channel: socket.socket
    values: int
    heartbeat: int
    parent_pipe: ParentDeathPipe


WorkerStarter = Callable[[RankInfo, WorkerLinks], StartedProcess]
"""Starts one rank's process, which inherits the links. Leaves no process behind when it raises."""


class SupervisedLauncher(Launcher):
    """A launcher of this node's ranks, in order, whose workers a `Supervisor` watches."""

    def __init__(self, local_ranks: tuple[RankInfo, ...], options: SupervisionOptions) -> None:
        self._local_ranks = local_ranks
        self._options = options

    def _new_group(self, job: int) -> WorkerGroup:
        cross_node_failures = CrossNodeFailures(self._options.endpoint, self._local_ranks[0], job)
        return WorkerGroup(Supervisor(self._options, cross_node_failures.publish), cross_node_failures)


@final
@dataclass(eq=False)
class WorkerGroup:
    """The workers that one launching process has started, and what it shares with them.

    Attributes:
        supervisor: watches the workers.
        cross_node_failures: reports their ends to the other nodes.
        address: host and port of the store; None where it is private.
        store: the store, where this process hosts it and has to keep it.
        run_id: names the group in torchrun's variables.
        values: the memory files for what the workers return, by global rank.
    """

    supervisor: Supervisor
    cross_node_failures: CrossNodeFailures
    address: tuple[str, int] | None = None
    store: Store | None = None
    run_id: str = field(default_factory=lambda: f"rankwise-{os.getpid()}")
    values: dict[int, int] = field(default_factory=dict)
    _memory_files: ExitStack = field(default_factory=ExitStack)

    def open_rendezvous(self, options: SupervisionOptions, rendezvous: str) -> None:
        """Host the store through which the ranks meet, where this process has to."""
        if (endpoint := options.endpoint) is not None:
            self.address = endpoint.address
            self.store = hosted_store(options.init_timeout, endpoint.address) if endpoint.hosts else None
        elif rendezvous == "tcp":
            self.store, self.address = host_store(options.init_timeout)

    def start(self, local_ranks: Iterable[RankInfo], starter: WorkerStarter) -> None:
        """Start a worker for each rank and hand it to the supervisor."""
        for ranks in local_ranks:
            self.values[ranks.global_rank] = self.new_memory_file()
            heartbeat = self.new_memory_file()
            reader = HeartbeatReader(heartbeat)
            with interrupts_blocked(), ExitStack() as undo:
                parent_pipe = ParentDeathPipe()
                undo.callback(parent_pipe.close)
                ours, theirs = socket.socketpair()
                fork_safety.close_in_child(ours)
                undo.callback(_close, ours)
                with theirs:
                    links = WorkerLinks(theirs, self.values[ranks.global_rank], heartbeat, parent_pipe)
                    process = starter(ranks, links)
                self.supervisor.add(ranks, ours, process, reader)
                undo.pop_all()  # from here on the supervisor's

    def new_memory_file(self) -> int:
        """Return the descriptor of a memory file that `close` closes."""
        descriptor = create_memory_file()
        self._memory_files.callback(os.close, descriptor)
        return descriptor

    def close(self) -> None:
        """End all workers and close everything."""
        try:
            self.supervisor.end_all()
        finally:
            self.supervisor.close()
            self._memory_files.close()
            self.cross_node_failures.wait_until_published()
            self.store = None  # it listens for as long as somebody refers to it, as a traceback may


def _close(sock: socket.socket) -> None:
    fork_safety.forget(sock)
    sock.close()

"""`WorkerGroup`: the workers that one launching process starts by a `WorkerStarter`, supervises and ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.environments.network import LOOPBACK
from rankwise.failures.exchange import CrossNodeFailures
from rankwise.launchers.context import WorkerContext, torchrun_variables
from rankwise.launchers.supervisor import SupervisionOptions, Supervisor
from rankwise.monitoring.heartbeat import HeartbeatReader
from rankwise.processes import fork_safety
from rankwise.processes.memory_file import Descriptor, owned_descriptor
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.signals import interrupts_blocked
from rankwise.processes.started_process import StartedProcess
from rankwise.ranks import RankInfo
from rankwise.stores.tcp import host_store, hosted_store

if TYPE_CHECKING:
    from torch.distributed import Store


@final
@dataclass(frozen=True)
class WorkerLinks:
    """The connections of a worker to the launching process."""

    channel: socket.socket
    values: Descriptor  # the memory file for what the worker returns
    heartbeat: Descriptor  # the memory file for its phase
    parent_pipe: ParentDeathPipe


WorkerStarter = Callable[[WorkerContext, WorkerLinks], StartedProcess]
"""Starts one rank's process, which inherits the links. Leaves no process behind when it raises."""


@final
class WorkerGroup:
    """The processes of this node's ranks, and the objects that the launching process shares with them."""

    def __init__(self, local_ranks: Sequence[RankInfo], options: SupervisionOptions, job: int) -> None:
        self.cross_node_failures = CrossNodeFailures(options.endpoint, local_ranks[0], job)
        self.supervisor = Supervisor(options, self.cross_node_failures.publish)
        self.address: tuple[str, int] | None = None  # of the store; None where it is private
        self.store: Store | None = None  # where this process hosts it, and has to keep it
        self.values: dict[int, Descriptor] = {}  # the workers' return values, by global rank
        self._options = options
        self.memory_files = ExitStack()

    def open_rendezvous(self, rendezvous: str, host: str = LOOPBACK) -> None:
        """Host the store through which the ranks meet, if this process must; `host` is for the TCP store."""
        timeout = self._options.init_timeout
        if (endpoint := self._options.endpoint) is not None:
            self.address = endpoint.address
            self.store = hosted_store(timeout, endpoint.address) if endpoint.hosts else None
        elif rendezvous == "tcp":
            self.store, self.address = host_store(timeout, (host, 0))

    def context_of(self, ranks: RankInfo) -> WorkerContext:
        """Return the context of a rank's present job, without a channel."""
        variables = torchrun_variables(ranks, self.address)
        return WorkerContext(ranks, variables, self.address, job=self.cross_node_failures.job)

    def start(self, local_ranks: Sequence[RankInfo], starter: WorkerStarter) -> None:
        """Start a worker for each rank and hand it to the supervisor."""
        for ranks in local_ranks:
            values = self.values[ranks.global_rank] = owned_descriptor(self.memory_files)
            heartbeat = owned_descriptor(self.memory_files)
            reader = HeartbeatReader(heartbeat.number)
            with interrupts_blocked(), ExitStack() as undo:
                parent_pipe = ParentDeathPipe()
                undo.callback(parent_pipe.close)
                ours, theirs = socket.socketpair()
                fork_safety.close_in_child(ours)
                undo.callback(ours.close)
                with theirs:
                    links = WorkerLinks(theirs, values, heartbeat, parent_pipe)
                    process = starter(self.context_of(ranks), links)
                self.supervisor.add(ranks, ours, process, reader)
                undo.pop_all()  # from here on the supervisor's

    def close(self) -> None:
        """End all workers and close everything."""
        try:
            self.supervisor.end_all()
        finally:
            self.supervisor.close()
            self.memory_files.close()
            self.cross_node_failures.wait_until_published()
            self.store = None  # it listens for as long as somebody refers to it, as a traceback may

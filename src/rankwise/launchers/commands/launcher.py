"""`CommandLauncher`: a function of the user starts a command for each rank, wherever it can."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import spawn
from typing import Any, ClassVar, final

from rankwise.checks import check_callable, check_is_a, check_value
from rankwise.environments.network import LOOPBACK, is_loopback, is_own_loopback_name
from rankwise.errors import ConfigurationError, InvalidTypeError, LaunchRefusedError, text_of
from rankwise.launchers.commands import worker as worker_module
from rankwise.launchers.commands.connection import RemoteJob
from rankwise.launchers.commands.process import CommandProcess, SupervisedCommand
from rankwise.launchers.commands.server import RankLink, RankServer
from rankwise.launchers.context import Entry, Launcher, WorkerContext
from rankwise.launchers.multiprocess import create_job, run_job
from rankwise.launchers.preconditions import (
    refuse_patched_threads,
    refuse_removed_directory,
    refuse_while_main_is_imported,
    shortages_named,
)
from rankwise.launchers.supervisor import SupervisionOptions
from rankwise.launchers.worker_group import WorkerGroup, WorkerLinks
from rankwise.launchers.worker_main import JobSpec
from rankwise.processes.command_line import count_launch
from rankwise.processes.memory_file import Descriptor
from rankwise.ranks import RankInfo
from rankwise.start import JOB_KEY
from rankwise.stores.sealed import job_key_of_environment

Start = Callable[[list[str], dict[str, str], int], CommandProcess]
_HIGHEST_PORT = 65535


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
        refuse_patched_threads()
        refuse_removed_directory()
        refuse_while_main_is_imported(self.start_method)
        started_s = time.monotonic()
        with ExitStack() as cleanup:
            with shortages_named(len(self.all_ranks)):
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
        remote = RemoteJob(worker, _preparation(rank), job.start_method)
        link = RankLink(rank, remote, job.entry, links, self.options.init_timeout)
        server.expect(rank, link)
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
        for method in ("wait", "kill"):
            if not callable(getattr(process, method, None)):
                raise InvalidTypeError(
                    argument="start()",
                    value=process,
                    expected="it to return an object with wait() and kill(), such as subprocess.Popen",
                )
        return process


def _preparation(rank: int) -> dict[str, Any]:
    """Return what a rank needs to import the main module, as multiprocessing's spawned processes do."""
    found = spawn.get_preparation_data(f"rankwise-{rank}")
    return {**found, "authkey": bytes(found["authkey"])}  # of a type that refuses to be pickled here

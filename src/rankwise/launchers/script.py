"""Run the script again: this process is local rank 0, and each other rank is the same command once more."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from rankwise import seed
from rankwise.errors import LaunchRefusedError, WorkerError
from rankwise.launchers import script_place
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.launchers.context import CallerLauncher, RankRun, WorkerContext, describe_context
from rankwise.launchers.preconditions import refuse_patched_threads, refuse_removed_directory, shortages_named
from rankwise.launchers.script_place import RunningScript, count_launch, rerun_command
from rankwise.launchers.supervisor import SupervisionOptions
from rankwise.launchers.worker_group import WorkerGroup, WorkerLinks
from rankwise.monitoring.heartbeat import HeartbeatReader, heartbeat_written_to
from rankwise.processes import parent_death
from rankwise.processes.exit_codes import call_at_exit, exit_code_of, exit_now, report_at_exit
from rankwise.processes.memory_file import owned_descriptor, pack, unpack
from rankwise.processes.signals import StoppedBySignal
from rankwise.processes.started_process import PopenProcess
from rankwise.ranks import RankInfo
from rankwise.start import CONTEXT_VARIABLE
from rankwise.stores.tcp import forget_store


@final
@dataclass(eq=False)
class ScriptLauncher(CallerLauncher):
    """Be local rank 0 and start the others by re-running the script; the next job uses the same processes.

    Where `command` replaces this process's own command line, its first launch must be this one.
    """

    local_ranks: tuple[RankInfo, ...]
    options: SupervisionOptions
    command: Sequence[str] | None = None

    @property
    def has_other_ranks(self) -> bool:
        return script_place.running is not None or not self.local_ranks[0].is_one_node

    @contextmanager
    def running(self, rendezvous: str) -> Iterator[RankRun]:
        """Be this process's rank in the block, then wait for the others; the main one gets their values."""
        earlier = count_launch()
        script = script_place.running
        if script is not None and script.pid != os.getpid():
            raise LaunchRefusedError(
                message="No job can start in a process that a rank has forked: it is not one of the ranks.",
                remedy='use strategy="single_device" there.',
            )
        if script is None:
            script = self._start_script(earlier, rendezvous)
        self._check_fits(script.ranks, script.address, rendezvous)
        with script.running(self.options.teardown_timeout_s) as run:
            yield run

    def context_between_jobs(self) -> WorkerContext | None:
        """Return the context of this process, if it runs the script with others that have run a job."""
        return None if script_place.running is None else script_place.running.context_between_jobs()

    def _start_script(self, earlier: int, rendezvous: str) -> _Script:
        refuse_patched_threads()
        refuse_removed_directory()
        command, directory = (list(self.command), str(Path.cwd())) if self.command else rerun_command()
        if earlier and self.command is None:
            raise LaunchRefusedError(
                message='strategy="ddp" cannot run the script again for this launch: '
                "it would come to an earlier one first.",
                facts=f"{earlier} of the script's launches came before, "
                "of another strategy or ended by a failure.",
                remedy='use strategy="ddp_spawn" or "ddp_fork" there: their processes run only the function.',
            )
        with shortages_named(len(self.local_ranks)):
            script = _Script(self.local_ranks, self.options)
            try:
                script.start(command, directory, rendezvous)
                script_place.running = script
            except BaseException:
                script.end()
                raise
        return script

    def _check_fits(self, existing: RankInfo, address: tuple[str, int] | None, rendezvous: str) -> None:
        """Refuse a launch that does not fit the processes of this script; each of them decides the same."""
        if existing.local_world_size != len(self.local_ranks):
            raise LaunchRefusedError(
                message=f"This script already runs as {existing.local_world_size} processes; "
                f"it cannot go on as {len(self.local_ranks)}.",
                remedy=f"use devices={existing.local_world_size} for every strategy of the script; "
                'strategy="single_device" runs in each of its processes by itself.',
            )
        if rendezvous == "tcp" and address is None:
            raise LaunchRefusedError(
                message="rendezvous='tcp' was asked for, but this script's processes meet privately.",
                facts="init_process_group=False and NCCL need one too.",
                remedy='pass rendezvous="tcp" to the first strategy of the script.',
            )


def _start_command(
    command: list[str], directory: str, worker: WorkerContext, links: WorkerLinks
) -> PopenProcess:
    """Run a command as another rank, which starts with this process's random state."""
    values, heartbeat = links.values.number, links.heartbeat.number
    pack(pickle.dumps(seed.AT_IMPORT), values)  # one value: it has thousands of numbers
    descriptors = {"channel": links.channel.fileno(), "values": values, "heartbeat": heartbeat}
    context = describe_context(worker, descriptors)
    popen = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **worker.variables, CONTEXT_VARIABLE: context},
        pass_fds=(*descriptors.values(), links.parent_pipe.worker_end),
    )
    return PopenProcess(popen, links.parent_pipe)


@final
class _Script(RunningScript):
    """The processes that run one script together, until the script ends or one of them fails."""

    def __init__(self, local_ranks: tuple[RankInfo, ...], options: SupervisionOptions) -> None:
        self.pid = os.getpid()
        self.ranks, self.local_ranks = local_ranks[0], local_ranks
        self.group = WorkerGroup(local_ranks, options, job=1)
        self._supervisor = self.group.supervisor
        self.jobs, self.address = 0, None
        self._is_in_job = False
        self._heartbeat = owned_descriptor(self.group.memory_files).number
        ours, self._mine = socket.socketpair()
        self._supervisor.add(local_ranks[0], ours, None, HeartbeatReader(self._heartbeat))
        self.channel = RankChannel(self._mine, on_lost=lambda: None)

    def start(self, command: list[str], directory: str, rendezvous: str) -> None:
        """Start the other ranks, and supervise them until this process ends."""
        self.group.open_rendezvous(rendezvous)
        self.address = self.group.address
        self.group.start(self.local_ranks[1:], partial(_start_command, command, directory))
        self._supervisor.start()
        call_at_exit(_finish)

    @contextmanager
    def running(self, timeout_s: float | None) -> Iterator[RankRun]:
        """Run one job, as this process's rank in the block; the supervisor has its own time limits."""
        if error := self._supervisor.error():
            self.end()
            raise error
        self.jobs = self.group.cross_node_failures.job = self.jobs + 1
        worker = self.group.context_of(self.local_ranks[0])
        worker.channel, worker.on_stop = self.channel, self._end_waits
        self._is_in_job = True
        try:
            self._supervisor.begin_job(until_exit=False)
            with (
                self._supervisor.handle_signals(),
                heartbeat_written_to(self._heartbeat),
                parent_death.children_end_with_parent(),
            ):
                with worker.running(finish=lambda _: self.channel.send(Kind.DONE)) as run:
                    yield run
                self._supervisor.wait_job()
            run.values = {worker.ranks.global_rank: run.value, **self._other_values()}
        except StoppedBySignal as stopped:
            self._supervisor.begin_exit()
            with suppress(StoppedBySignal, SystemExit, WorkerError):  # raised below
                self._supervisor.wait_job()
            raise self._first_failure(stopped) from None
        except BaseException as error:  # noqa: BLE001  whatever ended it
            # Its frames refer to connections that peers wait for in collectives.
            traceback.clear_frames(error.__traceback__)
            raise self._first_failure(error) from None
        finally:
            self._is_in_job = False
        self._supervisor.release()

    def _other_values(self) -> dict[int, Any]:
        values = {}
        for rank, file in self.group.values.items():
            with suppress(Exception):  # a value that cannot be pickled, or not read, stays with its rank
                values[rank] = unpack(file.number, copy=True)
        return values

    def _first_failure(self, error: BaseException) -> BaseException:
        """End all other processes; return the exception for a job that failed here or elsewhere."""
        self.end()
        is_interrupt = isinstance(error, KeyboardInterrupt) and not isinstance(error, StoppedBySignal)
        if self._supervisor.was_interrupted or is_interrupt:
            return KeyboardInterrupt()
        if self._supervisor.ended_by is not None:
            return SystemExit(128 + self._supervisor.ended_by)
        return self._supervisor.error() or error

    def end(self) -> None:
        """End the other processes and close everything."""
        script_place.running = None
        with suppress(OSError):  # the other side was first
            # Rank 0, which is here, has left, also where an interrupt kept it from reporting that.
            self._mine.shutdown(socket.SHUT_RDWR)
        try:
            self.group.close()
        finally:
            self.channel.close()
            if (address := self.group.address) is not None:
                forget_store(address)

    def _end_waits(self) -> None:
        # A wait in the store, in C++, runs no signal handler, but ends with the store's host.
        self.group.store = None
        self.group.cross_node_failures.forget_store_soon(lambda: self._is_in_job)

    def finish(self) -> None:
        """Wait until the other ranks reach the end of the script; raise their failure."""
        if self._is_in_job or self.pid != os.getpid():
            # A fork; or a daemon thread, which ends with the program, and the others with their channels.
            return
        if getattr(sys, "last_value", None) is None:
            self._supervisor.begin_exit()
            try:
                self._supervisor.wait_job()
            except BaseException as error:  # noqa: BLE001  an exit hook's would be printed, and the exit code 0
                try:
                    report_at_exit(error)
                    self.end()
                finally:
                    exit_now(exit_code_of(error))
        self.end()


def _finish() -> None:
    if isinstance(script := script_place.running, _Script):
        script.finish()

"""Run the script again: this process is local rank 0, and each other rank is the same command once more."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from rankwise.errors import LaunchRefusedError, WorkerError
from rankwise.failures.exchange import CrossNodeFailures
from rankwise.launchers.base import Launcher
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.launchers.context import Entry, WorkerContext, torchrun_variables
from rankwise.launchers.supervisor import Supervisor
from rankwise.launchers.worker_main import (
    InheritedContext,
    describe_context,
    inherited_context,
    wait_until_over,
)
from rankwise.monitoring.heartbeat import LEAVING, HeartbeatReader, heartbeat_written_to, report_phase
from rankwise.processes import fork_safety, parent_death
from rankwise.processes.command_line import CONTEXT_VARIABLE, count_launch, launch_count, rerun_command
from rankwise.processes.exit_codes import exit_code_of, exit_now
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.shared_memory import create_memory_file, pack, unpack
from rankwise.processes.signals import StoppedBySignal, interrupts_blocked
from rankwise.processes.started_process import PopenProcess
from rankwise.processes.stderr import write_stderr
from rankwise.ranks import RankInfo
from rankwise.stores.endpoint import RendezvousEndpoint
from rankwise.stores.tcp import forget_store, host_store, hosted_store

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["ScriptLauncher", "can_rerun", "script_place", "script_ranks"]

# How long who reads stderr may take to do so, before the process ends all the same.
_STDERR_TIMEOUT_S = 5.0


@final
class ScriptLauncher(Launcher):
    """Be local rank 0 and start the others by re-running the script; the next job uses the same processes.

    Args:
        seats: the local ranks, this process first.
        grace_period_s: how long a rank that was told to stop has before it is killed.
        init_timeout: how long the ranks may take to meet.
        stop_signals: what makes ranks that train stop at a boundary; otherwise it ends the job at once.
        stall_warning_s: after how long in one phase a rank is reported that others wait for.
        teardown_timeout_s: how long a rank's teardown may take; None for as long as it likes.
        command: what to run instead of this process's own command line; its first launch must be this one.
        meeting: where the nodes of the job meet; None for a job on one node.
    """

    runs_in_caller = True

    def __init__(
        self,
        local_ranks: tuple[RankInfo, ...],
        *,
        grace_period_s: float,
        init_timeout: timedelta,
        stop_signals: Sequence[int] = (signal.SIGTERM,),
        stall_warning_s: float = 60.0,
        teardown_timeout_s: float | None = None,
        command: Sequence[str] | None = None,
        endpoint: RendezvousEndpoint | None = None,
    ) -> None:
        self._local_ranks = local_ranks
        self._init_timeout = init_timeout
        self._watch_options = (grace_period_s, tuple(stop_signals), stall_warning_s, teardown_timeout_s)
        self._command = command
        self._endpoint = endpoint

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Run as this process's rank, wait for the others; see `Launcher.launch`.

        In the main process the values of the other ranks come along where they can be pickled; in the others
        each has its own.
        """
        earlier = count_launch()
        mine = inherited_context()
        if mine is not None:
            self._check_fits(mine.ranks, mine.address, rendezvous)
            return _run_in_worker(mine, entry, self._watch_options[-1])
        group = self._new_group(earlier, rendezvous) if _group is None else _group
        self._check_fits(group.local_ranks[0], group.address, rendezvous)
        return group.run(entry)

    def close(self) -> None:
        """The re-run scripts go on to the next job, and end with this process."""

    def _new_group(self, earlier: int, rendezvous: str) -> _ScriptGroup:
        global _group
        command, directory = (list(self._command), str(Path.cwd())) if self._command else rerun_command()
        if earlier and self._command is None:
            raise _leads_elsewhere(earlier)
        cross_node_failures = CrossNodeFailures(self._endpoint, self._local_ranks[0])
        supervisor = Supervisor(*self._watch_options, cross_node_failures.publish)
        group = _ScriptGroup(self._local_ranks, supervisor, cross_node_failures)
        try:
            group.meet(self._endpoint, rendezvous, self._init_timeout)
            group.start(command, directory)
            _group = group
        except BaseException:
            group.end()
            raise
        return group

    def _check_fits(self, existing: RankInfo, address: tuple[str, int] | None, rendezvous: str) -> None:
        """Refuse what the processes of this script cannot do; each of them comes to the same answer."""
        if existing.local_world_size != len(self._local_ranks):
            raise LaunchRefusedError(
                message=f"This script already runs as {existing.local_world_size} processes; "
                f"it cannot go on as {len(self._local_ranks)}.",
                remedy=f"use devices={existing.local_world_size} for every strategy of the script; "
                'strategy="single_device" runs in each of its processes by itself.',
            )
        if rendezvous == "tcp" and address is None:
            raise LaunchRefusedError(
                message="rendezvous='tcp' was asked for, but this script's processes meet privately.",
                facts="init_process_group=False and NCCL need one too.",
                remedy='pass rendezvous="tcp" to the first strategy of the script.',
            )


def _leads_elsewhere(earlier: int) -> LaunchRefusedError:
    return LaunchRefusedError(
        message='strategy="ddp" cannot run the script again for this launch: '
        "it would come to an earlier one first.",
        facts=f"{earlier} of the script's launches came before, of another strategy or ended by a failure.",
        remedy='use strategy="ddp_spawn" or "ddp_fork" there: their processes are told what to run.',
    )


def can_rerun() -> bool:
    """Whether running this process's command again leads to the launch that comes next."""
    if script_place() is not None:
        return True
    if launch_count() > 0:
        return False
    try:
        rerun_command()
    except LaunchRefusedError:
        return False
    return True


def script_ranks() -> int | None:
    """Return the number of local ranks that already run this script, or None where it runs alone."""
    place = script_place()
    return None if place is None else place.local_world_size


def script_place() -> RankInfo | None:
    """Return the ranks with which this process already runs its script, or None where it runs alone."""
    mine = inherited_context()
    if mine is not None:
        return mine.ranks
    return None if _group is None else _group.local_ranks[0]


# ---------------------------------------------------------------------------------------- the main process


@final
class _ScriptGroup:
    """The processes that run one script together; lives until the script ends or one of them fails."""

    def __init__(
        self,
        local_ranks: tuple[RankInfo, ...],
        supervisor: Supervisor,
        cross_node_failures: CrossNodeFailures,
    ) -> None:
        self.local_ranks = local_ranks
        self._supervisor = supervisor
        self._cross_node_failures = cross_node_failures
        self._store: Store | None = None
        self.address: tuple[str, int] | None = None
        self._run_id = f"rankwise-{os.getpid()}"
        self._values: dict[int, int] = {}
        self._heartbeats: dict[int, int] = {}
        self._jobs = 0
        self._is_in_job = False
        ours, mine = socket.socketpair()
        self._supervisor.add(local_ranks[0], ours, None, self._new_heartbeat(local_ranks[0]))
        self._channel = RankChannel(mine, on_lost=_nothing)
        fork_safety.close_in_child(mine)
        self._mine = mine

    def meet(self, endpoint: RendezvousEndpoint | None, rendezvous: str, init_timeout: timedelta) -> None:
        """Host the store through which the ranks meet, where this process has to."""
        if endpoint is not None:
            self.address = endpoint.address
            self._store = hosted_store(init_timeout, endpoint.address) if endpoint.hosts else None
        elif rendezvous == "tcp":
            self._store, self.address = host_store(init_timeout)

    def start(self, command: list[str], directory: str) -> None:
        """Start the other ranks, and watch them from here on until this process ends."""
        with interrupts_blocked():
            for ranks in self.local_ranks[1:]:
                self._start_one(ranks, command, directory)
        self._supervisor.start()
        atexit.register(self._finish_script)

    def run(self, entry: Entry) -> dict[int, Any]:
        """Run one job; return every local rank's value."""
        if error := self._supervisor.error():
            self.end()
            raise error
        self._jobs = self._cross_node_failures.job = self._jobs + 1
        ranks = self.local_ranks[0]
        variables = torchrun_variables(ranks, self.address, self._run_id)
        worker = WorkerContext(
            ranks,
            variables,
            self.address,
            channel=self._channel,
            job=self._jobs,
            on_stop=self._end_waits,
        )
        self._is_in_job = True
        try:
            self._supervisor.begin_job(until_exit=False)
            with self._in_job(ranks):
                value = worker.run(entry, finish=lambda _: self._channel.send(Kind.DONE))
                self._supervisor.wait_job()
            values = {ranks.global_rank: value, **self._other_values()}
        except StoppedBySignal as stopped:
            self._supervisor.begin_exit()
            with suppress(SystemExit, WorkerError):  # raised below
                self._supervisor.wait_job()
            raise self._first_failure(stopped) from None
        except BaseException as error:  # noqa: BLE001  whatever ended it
            # Its frames hold what holds the connections, and peers wait in collectives until these close.
            traceback.clear_frames(error.__traceback__)
            raise self._first_failure(error) from None
        finally:
            self._is_in_job = False
        self._supervisor.release()
        return values

    @contextmanager
    def _in_job(self, ranks: RankInfo) -> Iterator[None]:
        """Be rank 0 in the block: hear signals, tell how far it is, and take along what it forks."""
        heartbeat = self._heartbeats[ranks.global_rank]
        with (
            self._supervisor.handle_signals(),
            heartbeat_written_to(heartbeat),
            parent_death.children_end_with_parent(),
        ):
            yield

    def _start_one(self, ranks: RankInfo, command: list[str], directory: str) -> None:
        values = self._values[ranks.global_rank] = create_memory_file()
        heartbeat = self._new_heartbeat(ranks)
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            undo.callback(theirs.close)
            descriptors = (theirs.fileno(), values, self._heartbeats[ranks.global_rank])
            named = dict(
                zip(("channel", "value_descriptor", "heartbeat_descriptor"), descriptors, strict=True)
            )
            variables = torchrun_variables(ranks, self.address, self._run_id)
            worker = describe_context(ranks, self.address, self._run_id, **named)
            parent_pipe = ParentDeathPipe()
            undo.callback(parent_pipe.close)
            popen = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, **variables, CONTEXT_VARIABLE: worker},
                pass_fds=(*descriptors, parent_pipe.worker_end),
            )
            undo.callback(_kill, popen)
            self._supervisor.add(ranks, ours, PopenProcess(popen, parent_pipe), heartbeat)
            undo.pop_all()
        theirs.close()

    def _new_heartbeat(self, ranks: RankInfo) -> HeartbeatReader:
        descriptor = self._heartbeats[ranks.global_rank] = create_memory_file()
        return HeartbeatReader(descriptor)

    def _other_values(self) -> dict[int, Any]:
        values = {}
        for rank, descriptor in self._values.items():
            try:
                values[rank] = unpack(descriptor, copy=True)
            except EOFError:
                continue  # what cannot be pickled stays with its rank
        return values

    def _first_failure(self, error: BaseException) -> BaseException:
        """Return what to raise for a job that failed here or elsewhere, with every other process gone."""
        self.end()
        if self._supervisor.was_interrupted or isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt()
        if self._supervisor.ended_by is not None:
            return SystemExit(128 + self._supervisor.ended_by)
        return self._supervisor.error() or error

    def end(self) -> None:
        """End the other processes, and let go of everything."""
        global _group
        _group = None
        atexit.unregister(self._finish_script)
        with suppress(OSError):  # the other side was first
            # Rank 0, which is here, has left, also where it was interrupted before it could say so.
            self._mine.shutdown(socket.SHUT_RDWR)
        try:
            self._supervisor.end_all()
        finally:
            self._supervisor.close()
            fork_safety.forget(self._mine)
            self._channel.close()
            for descriptor in (*self._values.values(), *self._heartbeats.values()):
                os.close(descriptor)
            self._cross_node_failures.wait_until_published()
            if self.address is not None:
                forget_store(self.address)
            self._drop_store()

    def _end_waits(self) -> None:
        self._drop_store()  # this process's own wait in it, in C++, hears no signal, but ends with its host
        self._cross_node_failures.forget_store_soon(lambda: self._is_in_job)

    def _drop_store(self) -> None:
        self._store = None

    def _finish_script(self) -> None:
        """Let the other ranks come to the end of the script too; a failure there is one here."""
        if self._is_in_job:
            return  # a daemon thread's: it ends with the program, and the others when their channels close
        if getattr(sys, "last_value", None) is None:
            self._supervisor.begin_exit()
            try:
                self._supervisor.wait_job()
            except BaseException as error:  # noqa: BLE001  here it would be printed, and the exit code be 0
                self._leave_for(error)
        self.end()

    def _leave_for(self, error: BaseException) -> NoReturn:
        try:
            _show(error)
            self.end()
        finally:
            exit_now(exit_code_of(error))


_group: _ScriptGroup | None = None


# ---------------------------------------------------------------------------------------- the other ranks


def _run_in_worker(mine: InheritedContext, entry: Entry, timeout_s: float | None) -> dict[int, Any]:
    mine.jobs += 1
    if mine.jobs == 1:
        atexit.register(report_phase, LEAVING)
    variables = torchrun_variables(mine.ranks, mine.address, mine.run_id)
    worker = WorkerContext(mine.ranks, variables, mine.address, channel=mine.channel, job=mine.jobs)

    def finish(value: object) -> None:
        try:
            pack(value, mine.value_descriptor)
        except Exception:  # noqa: BLE001  pickling runs anybody's code
            os.ftruncate(mine.value_descriptor, 0)  # it cannot travel, and need not
        mine.channel.send(Kind.DONE)
        wait_until_over(mine.channel, timeout_s)

    try:
        return {mine.ranks.global_rank: worker.run(entry, finish)}
    except StoppedBySignal:
        raise
    except BaseException:  # noqa: BLE001  whatever ended it
        # Told over the channel, and raised by the main process. This one leaves without a word, and does not
        # search what is left for garbage, which with torch loaded takes most of a second.
        gc.freeze()
        raise SystemExit(1) from None


def _show(error: BaseException) -> None:
    if isinstance(error, WorkerError):  # its own traceback says more than ours
        write_stderr(f"{type(error).__name__}: {error}\n", _STDERR_TIMEOUT_S)
    else:
        write_stderr("".join(traceback.format_exception(error)), _STDERR_TIMEOUT_S)


def _kill(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def _nothing() -> None:
    pass

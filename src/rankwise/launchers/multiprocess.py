"""Run a function in processes of multiprocessing: spawned, forked, or forked by a warm forkserver."""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction, resource_tracker, util
from pathlib import Path
from typing import Any, final

import torch

from rankwise.errors import LaunchRefusedError
from rankwise.failures.exchange import CrossNodeFailures
from rankwise.launchers.base import Launcher
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.launchers.context import Entry, WorkerContext, torchrun_variables
from rankwise.launchers.supervisor import Supervisor
from rankwise.monitoring.heartbeat import LEAVING, HeartbeatReader, report_phase, write_heartbeat_to
from rankwise.monitoring.stacks import write_stacks_on_signal
from rankwise.processes import fork_safety, parent_death
from rankwise.processes.command_line import count_launch
from rankwise.processes.exit_codes import end_pools, exit_now
from rankwise.processes.fork_safety import import_dynamo, pause_openmp
from rankwise.processes.parent_death import ParentDeathPipe
from rankwise.processes.shared_memory import create_memory_file, pack, pack_or_explain, unpack
from rankwise.processes.signals import (
    StoppedBySignal,
    ignore_interrupts_in_workers,
    interrupts_blocked,
)
from rankwise.processes.started_process import MultiprocessingProcess
from rankwise.ranks import RankInfo
from rankwise.stores.endpoint import RendezvousEndpoint
from rankwise.stores.tcp import host_store, hosted_store

__all__ = [
    "PRELOAD",
    "Descriptor",
    "MultiprocessLauncher",
    "owned_descriptor",
    "refuse_what_cannot_be_imported",
    "refuse_where_impossible",
    "settle_before_fork",
]

# A fork copies locks as they are: no other thread may be looking up names for a store of its own meanwhile.
_one_at_a_time = threading.Lock()
# The jobs on several nodes, which all meet in one store: every node counts the same.
_jobs = itertools.count(1)
PRELOAD = "rankwise.launchers.preload"


def _unlock_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)


@final
class MultiprocessLauncher(Launcher):
    """Start one process per local rank, run the function there, bring every value back.

    Args:
        start_method: `"spawn"`, `"fork"` or `"forkserver"`.
        seats: the ranks to start, in order.
        grace_period_s: how long a rank that was told to stop has before it is killed.
        init_timeout: how long the ranks may take to meet.
        stop_signals: what makes ranks that train stop at a boundary; otherwise it ends the job at once.
        stall_warning_s: after how long in one phase a rank is reported that others wait for.
        teardown_timeout_s: how long a rank's teardown may take; None for as long as it likes.
        meeting: where the nodes of the job meet; None for a job on one node.
    """

    runs_in_caller = False

    def __init__(
        self,
        start_method: str,
        local_ranks: tuple[RankInfo, ...],
        *,
        grace_period_s: float,
        init_timeout: timedelta,
        stop_signals: Sequence[int] = (signal.SIGTERM,),
        stall_warning_s: float = 60.0,
        teardown_timeout_s: float | None = None,
        endpoint: RendezvousEndpoint | None = None,
    ) -> None:
        self.pickles_entry = start_method != "fork"
        self._start_method = start_method
        self._local_ranks = local_ranks
        self._init_timeout = init_timeout
        self._watch_options = (grace_period_s, tuple(stop_signals), stall_warning_s, teardown_timeout_s)
        self._endpoint = endpoint

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Start, run, bring back; see `Launcher.launch`."""
        count_launch()
        refuse_where_impossible(self._start_method)
        with ExitStack() as cleanup:
            with _one_at_a_time:
                job = self._prepare(entry, described, rendezvous, cleanup)
            cross_node_failures = CrossNodeFailures(self._endpoint, self._local_ranks[0], job.number)
            cleanup.callback(cross_node_failures.wait_until_published)
            supervisor = Supervisor(*self._watch_options, cross_node_failures.publish)
            values = {ranks.global_rank: owned_descriptor(cleanup) for ranks in self._local_ranks}
            heartbeats = {ranks.global_rank: owned_descriptor(cleanup) for ranks in self._local_ranks}
            with _ending_everything(supervisor):
                with _one_at_a_time:
                    self._start(job, values, heartbeats, supervisor)
                supervisor.start()
                supervisor.begin_job(until_exit=True)
                with supervisor.handle_signals(), _ended_with_the_program(supervisor):
                    supervisor.wait_job()
            return {rank: unpack(descriptor, copy=False) for rank, descriptor in values.items()}

    def close(self) -> None:
        """Nothing is kept between launches; a forkserver, once warm, ends with this process."""

    def _prepare(
        self, entry: Entry, described: Mapping[str, object], rendezvous: str, cleanup: ExitStack
    ) -> _Job:
        address = None
        if self._endpoint is not None:
            address = self._endpoint.address
            if self._endpoint.hosts:
                hosted_store(self._init_timeout, address)
        elif rendezvous == "tcp":
            store, address = host_store(self._init_timeout)
            cleanup.callback(lambda kept: None, store)  # the store listens for as long as this block holds it
        packed: Descriptor | None = None
        if self.pickles_entry:
            packed = Descriptor(owned_descriptor(cleanup))
            pack_or_explain(entry, packed.number, self._start_method, described)
            refuse_what_cannot_be_imported(packed.number, self._start_method)
        return _Job(
            entry=None if self.pickles_entry else entry,
            packed_entry=packed,
            address=address,
            start_method=multiprocessing.get_start_method(allow_none=True)
            or multiprocessing.get_all_start_methods()[0],
            environ=dict(os.environ) if self._start_method == "forkserver" else None,
            openmp_threads=settle_before_fork() if self._start_method == "fork" else None,
            run_id=f"rankwise-{os.getpid()}",
            number=1 if self._endpoint is None else next(_jobs),
        )

    def _start(
        self, job: _Job, values: Mapping[int, int], heartbeats: Mapping[int, int], supervisor: Supervisor
    ) -> None:
        context: Any = multiprocessing.get_context(self._start_method)
        if self._start_method == "forkserver":
            context.set_forkserver_preload([PRELOAD])
        if self._start_method != "fork":
            resource_tracker.ensure_running()  # otherwise later: it lets SIGINT through again
        for ranks in self._local_ranks:
            with interrupts_blocked(), ExitStack() as undo:
                parent_pipe = ParentDeathPipe()
                undo.callback(parent_pipe.close)
                numbers = (values[ranks.global_rank], heartbeats[ranks.global_rank], parent_pipe.worker_end)
                heartbeat = HeartbeatReader(heartbeats[ranks.global_rank])
                ours, theirs = socket.socketpair()
                undo.callback(_close, ours)
                fork_safety.close_in_child(ours)
                process = context.Process(
                    target=_work,
                    args=(job, ranks, theirs, *map(Descriptor, numbers)),
                    name=f"rankwise-{ranks.global_rank}",
                )
                undo.callback(_end, process)
                with theirs:
                    process.start()
                supervisor.add(ranks, ours, MultiprocessingProcess(process, parent_pipe), heartbeat)
                undo.pop_all()  # from here on the supervisor's


def _close(sock: socket.socket) -> None:
    fork_safety.forget(sock)
    sock.close()


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process that nobody supervises yet, if it was started."""
    if process.pid is not None:
        process.kill()
        process.join()
        process.close()


@contextmanager
def _ending_everything(supervisor: Supervisor) -> Iterator[None]:
    """Leave no process behind, however the block is left."""
    try:
        yield
    except BaseException:
        supervisor.end_all()
        raise
    finally:
        supervisor.close()


@contextmanager
def _ended_with_the_program(supervisor: Supervisor) -> Iterator[None]:
    """End the job when the program ends while a daemon thread waits for it in the block.

    Otherwise multiprocessing, which joins all that it has started, would hold the program up until then.
    """
    mine = os.getpid()

    def end() -> None:
        if os.getpid() == mine:
            supervisor.ended_by = signal.SIGTERM  # the thread leaves without a word
            supervisor.end_all()

    atexit.register(end)
    try:
        yield
    finally:
        atexit.unregister(end)


@final
@dataclass
class _Job:
    """What every worker of one launch is given."""

    entry: Entry | None
    packed_entry: Descriptor | None
    address: tuple[str, int] | None
    start_method: str
    environ: dict[str, str] | None
    openmp_threads: int | None
    run_id: str
    number: int


@final
class Descriptor:
    """A file descriptor that travels to a worker: inherited by a fork, duplicated where it is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], Descriptor], tuple[Any]]:
        return _receive_descriptor, (reduction.DupFd(self.number),)


def _receive_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


def owned_descriptor(cleanup: ExitStack) -> int:
    """Return the descriptor of a memory file that is closed with `cleanup`."""
    descriptor = create_memory_file()
    cleanup.callback(os.close, descriptor)
    return descriptor


# ---------------------------------------------------------------------------------------- in the worker


def _work(
    job: _Job,
    ranks: RankInfo,
    sock: socket.socket,
    values: Descriptor,
    heartbeat: Descriptor,
    parent_pipe: Descriptor,
) -> None:
    """Be one rank: the function that every started process runs."""
    ignore_interrupts_in_workers()
    parent_death.end_children_with_this_process()
    write_heartbeat_to(heartbeat.number)
    write_stacks_on_signal()
    channel = RankChannel(sock, on_lost=_exit_immediately)
    channel.send(Kind.HELLO)
    multiprocessing.set_start_method(job.start_method, force=True)
    if job.environ is not None:
        os.environ.clear()
        os.environ.update(job.environ)
    if job.openmp_threads is not None:
        torch.set_num_threads(job.openmp_threads)
    variables = torchrun_variables(ranks, job.address, job.run_id)
    worker = WorkerContext(ranks, variables, job.address, channel=channel, job=job.number)
    try:
        worker.run(_entry_of(job), finish=lambda value: pack(value, values.number))
        channel.send(Kind.DONE)
    except StoppedBySignal:
        pass  # told over the channel; the main process raises it, as this one has nothing else to do
    except BaseException:  # noqa: BLE001  whatever ended it
        exit_now(1)  # told over the channel; the main process raises it
    report_phase(LEAVING)
    if job.entry is not None:
        _end_fork()
    gc.freeze()  # what is left need not be searched for garbage: the process ends


def _entry_of(job: _Job) -> Entry:
    if job.entry is not None:
        return job.entry

    def unpack_and_run(worker: WorkerContext) -> Any:
        if job.packed_entry is None:
            raise ValueError("the job holds no function")
        entry: Entry = unpack(job.packed_entry.number, copy=False)
        return entry(worker)

    return unpack_and_run


def _end_fork() -> None:
    """End a forked process as multiprocessing does, but for the exit hooks of threads.

    These are the caller's, whose threads do not exist here; of the pools it is done without.
    """
    end_pools()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    util._exit_function()  # type: ignore[attr-defined]  # typeshed leaves it out
    exit_now(0)


def _exit_immediately() -> None:
    exit_now(1)


# ---------------------------------------------------------------------------------------- before the start


def settle_before_fork() -> int | None:
    """Make this process safe to fork; return the number of threads to fall back to, or None."""
    import_dynamo()  # once here is less than once in every rank
    return None if pause_openmp() else 1


def refuse_where_impossible(start_method: str) -> None:
    """Refuse to start processes where that cannot work.

    Raises:
        LaunchRefusedError: says why.
    """
    if multiprocessing.process.current_process().daemon:
        raise LaunchRefusedError(
            message=f"start_method={start_method!r} cannot work in a daemon: it may start no processes.",
            remedy="launch from a process that is not a daemon; a DataLoader's worker is one.",
        )
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise LaunchRefusedError(
            message=f"start_method={start_method!r} was used while the main module was still being imported.",
            facts="each worker imports the main module, which launches again.",
            remedy='put what starts the training under: if __name__ == "__main__":',
        )
    if start_method == "fork" and torch.cuda.is_initialized():
        raise LaunchRefusedError(
            message="start_method='fork' cannot work: CUDA is initialised in this process already.",
            remedy='touch CUDA only inside what is launched, or use strategy="ddp_spawn" or "ddp".',
        )


def refuse_what_cannot_be_imported(descriptor: int, start_method: str) -> None:
    """Refuse what is defined in a `__main__` that no other process can import: a notebook's, a shell's."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_importable = getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())
    if not is_importable and b"__main__" in os.pread(descriptor, os.fstat(descriptor).st_size, 0):
        raise LaunchRefusedError(
            message=f"start_method={start_method!r} cannot find what a notebook, a shell or -c defines.",
            facts="something that is launched is defined in __main__, which the workers cannot import.",
            remedy='use strategy="ddp_notebook" (a fork), or move it into a module.',
        )

"""Run a function in processes of multiprocessing: spawned, forked, or forked by a warm forkserver."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any, final

import torch

import rankwise.process_group.step_agreement  # noqa: F401  ranks need it: forked ones inherit it
from rankwise.errors import LaunchRefusedError
from rankwise.failures.record import FailureRecord
from rankwise.launchers import preconditions
from rankwise.launchers.context import Entry, Launcher, WorkerContext
from rankwise.launchers.process_state import ProcessState
from rankwise.launchers.script_place import count_launch
from rankwise.launchers.supervisor import SupervisionOptions, Supervisor
from rankwise.launchers.worker_group import WorkerGroup, WorkerLinks
from rankwise.launchers.worker_main import JobSpec, open_channel, run_worker
from rankwise.monitoring.heartbeat import LEAVING, report_phase
from rankwise.processes.exit_codes import call_at_exit, end_pools, exit_now
from rankwise.processes.fork_safety import import_dynamo, objects_frozen, pause_openmp, release_memory
from rankwise.processes.memory_file import Descriptor, owned_descriptor, pack, unpack
from rankwise.processes.pickling_errors import pack_or_explain
from rankwise.processes.signals import StoppedBySignal
from rankwise.processes.started_process import MultiprocessingProcess
from rankwise.ranks import RankInfo

# A fork copies locks as they are: no other thread may be looking up names for a store of its own meanwhile.
_one_at_a_time = threading.Lock()
_jobs = itertools.count(1)  # on several nodes, which all meet in one store: every node counts the same
_supervisors: dict[Supervisor, threading.Thread] = {}  # of the jobs that threads of this process wait for
_THREAD_LEAVES_S = 2.0
PRELOAD = "rankwise.launchers.preload"


def _forget_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _supervisors.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _end_jobs() -> None:
    """End the jobs of daemon threads: multiprocessing joins all its processes when the program exits."""
    for supervisor, thread in list(_supervisors.items()):
        supervisor.end_all(by=signal.SIGTERM)
        thread.join(_THREAD_LEAVES_S)  # a tensor that it frees while the interpreter ends aborts the process


@final
@dataclass(eq=False)
class MultiprocessLauncher(Launcher):
    """Start one process per local rank by `"spawn"`, `"fork"` or `"forkserver"`; run the function there."""

    copies_entry = True

    start_method: str
    local_ranks: tuple[RankInfo, ...]
    options: SupervisionOptions

    @property
    def has_other_ranks(self) -> bool:
        return not self.local_ranks[0].is_one_node

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Start, run, collect the values; see `Launcher.launch`."""
        count_launch()
        refuse_where_impossible(self.start_method)
        started_s = time.monotonic()
        with ExitStack() as cleanup:
            with _one_at_a_time, preconditions.shortages_named(len(self.local_ranks)):
                job = create_job(self.start_method, entry, described, cleanup)
                number = 1 if self.options.endpoint is None else next(_jobs)
                group = WorkerGroup(self.local_ranks, self.options, number)
                cleanup.callback(group.close)
                group.open_rendezvous(rendezvous)
                if self.start_method != "fork":  # otherwise it starts later, and lets SIGINT through again
                    resource_tracker.ensure_running()
                with objects_frozen() if self.start_method == "fork" else nullcontext():
                    group.start(self.local_ranks, partial(_start, self.start_method, job))
                group.supervisor.start()
            return run_job(group, started_s)


def run_job(group: WorkerGroup, started_s: float) -> dict[int, Any]:
    """Supervise started workers until they have exited; return their values, or raise as `launch` does."""
    supervisor = group.supervisor
    supervisor.begin_job(until_exit=True)
    call_at_exit(_end_jobs)
    _supervisors[supervisor] = threading.current_thread()
    try:
        with supervisor.handle_signals():
            supervisor.wait_job()
    except StoppedBySignal as stopped:
        stopped.values = returned_values(supervisor.ranks(), group.values.values(), started_s)
        raise
    finally:
        _supervisors.pop(supervisor, None)
    return returned_values(supervisor.ranks(), group.values.values(), started_s)


def returned_values(
    ranks: list[FailureRecord], files: Iterable[Descriptor], started_s: float
) -> dict[int, Any]:
    """Return ranks' values by global rank; raise a rank's `WorkerRaisedError` if one cannot be unpickled."""
    values = {}
    for rank, file in zip(ranks, files, strict=True):
        try:
            values[rank.global_rank] = unpack(file.number, copy=False)
        except Exception as error:  # noqa: BLE001  unpickling runs the user's code
            raise rank.of_value(error).to_error(started_s, (), ()) from None
    return values


def create_job(
    start_method: str, entry: Entry, described: Mapping[str, object], cleanup: ExitStack
) -> JobSpec:
    """Return the data for workers of a start method; prepare this process for starting them."""
    flags = {}
    if start_method == "fork":
        import_dynamo()  # once here is faster than once in every rank
        release_memory()
        flags = {} if pause_openmp() else {"threads": 1}
    entry = partial(ProcessState.of_this_process(**flags).run, entry)
    packed: Entry | Descriptor = entry
    if start_method != "fork":
        packed = owned_descriptor(cleanup)
        pack_or_explain(entry, packed.number, start_method, described)
        _refuse_what_cannot_be_imported(packed.number, start_method)
    if start_method == "forkserver":
        imported = [name for name in list(sys.modules) if name.startswith("rankwise.")]  # as its ranks will
        multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD, *imported])
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return JobSpec(packed, default, dict(os.environ) if start_method == "forkserver" else None)


def _start(
    start_method: str, job: JobSpec, worker: WorkerContext, links: WorkerLinks
) -> MultiprocessingProcess:
    """Start a rank's process."""
    # The rank must keep its end of the parent pipe open: the kernel ends the rank by it.
    files = (links.values, links.heartbeat, Descriptor(links.parent_pipe.worker_end))
    context: Any = multiprocessing.get_context(start_method)
    name = f"rankwise-{worker.ranks.global_rank}"
    process = context.Process(target=_work, args=(job, worker, links.channel, *files), name=name)
    process.start()
    return MultiprocessingProcess(process, links.parent_pipe)


def _work(
    job: JobSpec,
    worker: WorkerContext,
    sock: socket.socket,
    values: Descriptor,
    heartbeat: Descriptor,
    parent_pipe: Descriptor,
) -> None:
    """Be one rank: the function that every started process runs."""
    worker.channel = open_channel(sock, heartbeat.number)
    job.set_up_process({})
    # Failures are reported over the channel; the main process raises them.
    run_worker(job.run, worker, lambda value: pack(value, values.number), on_failure=lambda error: 1)
    report_phase(LEAVING)
    if not isinstance(job.entry, Descriptor):
        _exit_fork()


def _exit_fork() -> None:
    """End a forked process as multiprocessing does, without the exit hooks of the caller's threads."""
    end_pools()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    util._exit_function()  # type: ignore[attr-defined]  # typeshed leaves it out
    exit_now(0)


def refuse_where_impossible(start_method: str) -> None:
    """Raise `LaunchRefusedError` where starting processes cannot work."""
    preconditions.refuse_patched_threads()
    preconditions.refuse_removed_directory()
    if multiprocessing.process.current_process().daemon:
        raise LaunchRefusedError(
            message=f"start_method={start_method!r} cannot work in a daemon: it may start no processes.",
            remedy="launch from a process that is not a daemon; a DataLoader's worker is one.",
        )
    preconditions.refuse_while_main_is_imported(start_method)
    if start_method == "fork" and torch.cuda.is_initialized():
        raise LaunchRefusedError(
            message="start_method='fork' cannot work: CUDA is initialised in this process already.",
            remedy="touch CUDA only inside what is launched: in a notebook restart the kernel first; in a "
            'script strategy="ddp_spawn" or "ddp" works, too.',
        )


def _refuse_what_cannot_be_imported(descriptor: int, start_method: str) -> None:
    """Refuse objects of a `__main__` that no other process can import, such as a notebook's or a shell's."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_importable = getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())
    if not is_importable and b"__main__" in os.pread(descriptor, os.fstat(descriptor).st_size, 0):
        raise LaunchRefusedError(
            message=f"start_method={start_method!r} cannot find what a notebook, a shell or -c defines.",
            facts="something that is launched is defined in __main__, which the workers cannot import.",
            remedy='use strategy="ddp_notebook" (a fork), or move it into a module.',
        )

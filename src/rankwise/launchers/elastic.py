"""`ElasticLauncher`: torch's elastic agent starts the ranks, and starts them again after a failure."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import multiprocessing
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from rankwise.errors import WorkerError
from rankwise.failures.classify import start_exception_chain
from rankwise.failures.record import FailureRecord, first_cause
from rankwise.launchers.base import Launcher
from rankwise.launchers.context import Entry, WorkerContext
from rankwise.launchers.multiprocess import (
    PRELOAD,
    Descriptor,
    owned_descriptor,
    refuse_what_cannot_be_imported,
    refuse_where_impossible,
    settle_before_fork,
)
from rankwise.processes import parent_death
from rankwise.processes.command_line import count_launch
from rankwise.processes.exit_codes import exit_now
from rankwise.processes.shared_memory import pack, pack_or_explain, unpack
from rankwise.processes.signals import ROUTER, SignalRequest, StoppedBySignal, ignore_interrupts_in_workers
from rankwise.ranks import RankInfo
from rankwise.stores.restart import RestartInfo, note_restart

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["ElasticLauncher", "Nodes"]

# The agent restarts its ranks without telling anybody why; it only logs torch's exception.
_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


@contextmanager
def agent_log_shown(on_exit: Callable[[int, int], None]) -> Iterator[None]:
    """Keep the agent from printing its own traceback, which leads nowhere, for every rank that fails.

    Args:
        on_exit: called with the pid of a rank that left without an exception, and its exit status: negative
            for the signal that killed it.

    Mutates: level and filters of loggers of torch, until the block ends.
    """
    from torch.multiprocessing import ProcessExitedException

    def hear(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ProcessExitedException):
            on_exit(error.error_pid, error.exit_code)
        return record.levelno >= logging.CRITICAL

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
        logger.addFilter(hear)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeFilter(hear)
            logger.setLevel(level)


# A rank whose failure reads like the echo of another's leaves that much later, after the other.
_SETTLE_S = 0.5
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LEFT_TO_TORCH = signal.SIGQUIT  # some signal must be
# How long ranks that train have to come to a boundary and save, once told by SIGTERM: as under torchrun.
_STOP_TIMEOUT_S = 30
_log = logging.getLogger(__name__)
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@final
@dataclass(frozen=True)
class Nodes:
    """How many nodes make a job, and where their agents meet.

    Attributes:
        fewest: with how many the job begins, or goes on after a failure.
        most: how many it takes.
        endpoint: host and port of the first node's agent; empty for a job on one node.
        run_id: what the agents of a job have in common; empty for a random one.
        own_address: given the endpoint's host, returns the address at which this node listens.
    """

    fewest: int = 1
    most: int = 1
    endpoint: str = ""
    run_id: str = ""
    own_address: Callable[[str], str] = str


@final
class ElasticLauncher(Launcher):
    """Be the agent of this node: start the ranks, and start all again when one fails.

    Args:
        start_method: `"spawn"`, `"fork"` or `"forkserver"`.
        local_world_size: how many ranks this node has.
        nodes: which agents belong together.
        max_restarts: how many failures are answered with a new start.
        grace_period_s: how long a rank that is told to stop has before it is killed; whole seconds, 30 at
            least, for a checkpoint to be saved.
        init_timeout: how long the agents may take to meet.
    """

    runs_in_caller = False

    def __init__(
        self,
        start_method: str,
        local_world_size: int,
        nodes: Nodes,
        *,
        max_restarts: int,
        grace_period_s: float,
        init_timeout: timedelta,
    ) -> None:
        self.pickles_entry = start_method != "fork"
        self._start_method = start_method
        self._local_world_size = local_world_size
        self._nodes = nodes
        self._max_restarts = max_restarts
        self._grace_period_s = grace_period_s
        self._init_timeout = init_timeout

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Start, watch, start again, bring back; see `Launcher.launch`."""
        count_launch()
        refuse_where_impossible(self._start_method)
        started_s = time.monotonic()
        with ExitStack() as cleanup:
            job = self._prepare(entry, described, cleanup)
            with _agent_signals(), agent_log_shown(job.note_exit):
                failures = self._run(job)
            gc.collect()  # the agent, with the store that it hosts, is a cycle
            if failures:
                raise _worker_error(failures, job, started_s)
            return dict(unpack(value.number, copy=False) for value in job.values)

    def _run(self, job: _Job) -> Mapping[int, Any]:
        """Run the agent to its end; return torch's words on the ranks that failed, by global rank."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        try:
            elastic_launch(self._config(job), _work)(job)
        except ChildFailedError as error:
            failures: Mapping[int, Any] = error.failures
            return failures
        return {}

    def close(self) -> None:
        """Nothing is kept between launches."""

    def _prepare(self, entry: Entry, described: Mapping[str, object], cleanup: ExitStack) -> _Job:
        packed = None
        if self.pickles_entry:
            packed = Descriptor(owned_descriptor(cleanup))
            pack_or_explain(entry, packed.number, self._start_method, described)
            refuse_what_cannot_be_imported(packed.number, self._start_method)
        if self._start_method == "forkserver":
            multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
        ranks = range(self._local_world_size)
        return _Job(
            entry=None if self.pickles_entry else entry,
            packed_entry=packed,
            values=[Descriptor(owned_descriptor(cleanup)) for _ in ranks],
            failures=[Descriptor(owned_descriptor(cleanup)) for _ in ranks],
            start_method=multiprocessing.get_start_method(allow_none=True)
            or multiprocessing.get_all_start_methods()[0],
            environ=dict(os.environ) if self._start_method == "forkserver" else None,
            openmp_threads=settle_before_fork() if self._start_method == "fork" else None,
            agent_pid=os.getpid(),
            is_alone=not self._nodes.endpoint,
        )

    def _config(self, job: _Job) -> LaunchConfig:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        from rankwise.launchers.elastic_rendezvous import LOOPBACK, NODES, register_loopback, register_nodes

        register_loopback()
        register_nodes()
        options: dict[str, Any] = {
            "min_nodes": self._nodes.fewest,
            "max_nodes": self._nodes.most,
            "nproc_per_node": self._local_world_size,
            "run_id": self._nodes.run_id or f"rankwise-{secrets.token_hex(8)}",
            "rdzv_backend": NODES if self._nodes.endpoint else LOOPBACK,
            "rdzv_endpoint": self._nodes.endpoint,
            "rdzv_configs": {
                "timeout": math.ceil(self._init_timeout.total_seconds()),
                "on_start": job.begin,
                "own_address": self._nodes.own_address,
            },
            "max_restarts": self._max_restarts,
            "monitor_interval": 0.1,
            "start_method": self._start_method,
            "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),  # ranks print where this process does
            "shutdown_timeout": max(_STOP_TIMEOUT_S, math.ceil(self._grace_period_s)),
            "signals_to_handle": _LEFT_TO_TORCH.name,
        }
        known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older versions lack the last one
        return LaunchConfig(**{name: value for name, value in options.items() if name in known})


@final
@dataclass
class _Job:
    """What every worker is given, at each start anew."""

    entry: Entry | None
    packed_entry: Descriptor | None
    values: list[Descriptor]
    failures: list[Descriptor]
    start_method: str
    environ: dict[str, str] | None
    openmp_threads: int | None
    agent_pid: int
    is_alone: bool
    silent: list[FailureRecord] = field(default_factory=list)
    # The same on all nodes, where torch's own count is each agent's.
    start: RestartInfo = field(default_factory=RestartInfo)

    def records(self) -> list[FailureRecord]:
        """Return what the ranks of the last start have said of their failures."""
        return [each for each in self._written() if each.exception_type]

    def note_exit(self, pid: int, status: int) -> None:
        """Note how a rank of the last start ended, unless it has said so; runs in the agent's process."""
        left = [each for each in self._written() if each.pid == pid and not each.exception_type]
        now_s = time.monotonic()
        self.silent += [dataclasses.replace(each, exit_status=status, at_s=now_s) for each in left]

    def _written(self) -> list[FailureRecord]:
        """Return what each rank has left: at its start that it is there, then what made it fail."""
        texts = [os.pread(each.number, os.fstat(each.number).st_size, 0) for each in self.failures]
        return [FailureRecord.from_json(text) for text in texts if text]

    def begin(self, start: RestartInfo) -> None:
        """Note which start it is; say that all ranks start again, and why; runs in the agent's process."""
        self.start = start
        if start.number:
            _log.warning("All ranks start again (restart %d): %s", start.number, self._why())
        self.silent.clear()

    def _why(self) -> str:
        unknown = (
            "a rank ended without a word" if self.is_alone else "nodes came or went, or a rank was killed"
        )
        # Where nodes come or go, the ranks that are there are asked to stop, and do.
        ddp_options = [each for each in self.records() if each.exception_type != StoppedBySignal.__name__]
        if not (records := [*self.silent, *ddp_options]):
            return unknown
        cause = first_cause(records)
        return f"{unknown}; {cause.line()}" if cause.is_consequence else cause.line()


# ---------------------------------------------------------------------------------------- the agent's side


@contextmanager
def _agent_signals() -> Iterator[None]:
    """Let the agent end its ranks when a signal comes in the block; raise what the signal means.

    Mutates: the handlers of SIGTERM, SIGINT, SIGHUP and SIGQUIT, and a variable, restored on exit.

    Raises:
        KeyboardInterrupt: for SIGINT.
        SystemExit: with 128 + its number, for the others.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    is_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(_LEFT_TO_TORCH)
    variable = os.environ.get(_SIGNALS_VARIABLE)
    was_interrupted = False

    def end(request: SignalRequest) -> None:
        nonlocal was_interrupted
        if request.number == signal.SIGINT:
            was_interrupted = True  # the ranks ignore SIGINT
            raise SignalException("interrupted", sigval=signal.SIGKILL)
        if not request.is_repeat:
            raise SignalException(f"signal {request.number}", sigval=signal.Signals(request.number))

    try:
        with ROUTER.subscribe(set(_AGENT_SIGNALS) - {_LEFT_TO_TORCH}, end, in_main_thread=True):
            yield
    except SignalException as error:
        if was_interrupted or error.sigval is signal.SIGINT:  # older versions of torch set their handlers
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        if is_main_thread:
            signal.signal(_LEFT_TO_TORCH, before)
        os.environ.pop(_SIGNALS_VARIABLE, None)
        if variable is not None:
            os.environ[_SIGNALS_VARIABLE] = variable


def _worker_error(failures: Mapping[int, Any], job: _Job, started_s: float) -> WorkerError:
    """Return the exception for a job that failed more often than it may."""
    records = job.records()
    ddp_options = {record.pid for record in records}
    for global_rank, failure in failures.items():
        if failure.pid not in ddp_options:
            records.append(
                FailureRecord(
                    global_rank,
                    failure.local_rank,
                    (global_rank - failure.local_rank) // len(job.values),
                    failure.pid,
                    at_s=time.monotonic(),
                    exit_status=failure.exitcode,
                )
            )
    cause = first_cause(records)
    return cause.to_error(started_s, (), [record for record in records if record is not cause])


# ---------------------------------------------------------------------------------------- the worker's side


@start_exception_chain()
def _work(job: _Job) -> None:
    """Be one rank: the function that every started process runs, under torchrun's variables."""
    for number in _AGENT_SIGNALS:  # a fork inherits the agent's handlers, which raise
        signal.signal(number, signal.SIG_DFL)
    _leave_with(job.agent_pid)
    ignore_interrupts_in_workers()
    parent_death.end_children_with_this_process()
    multiprocessing.set_start_method(job.start_method, force=True)
    if job.environ is not None:
        os.environ.update({**job.environ, **_own_variables()})
    if job.openmp_threads is not None:
        import torch

        torch.set_num_threads(job.openmp_threads)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(job.start.number)
    note_restart(job.start)
    worker = _worker()
    local_rank = worker.ranks.local_rank
    failure = job.failures[local_rank].number
    _publish_failure(failure, FailureRecord.of_exit(worker.ranks, os.getpid(), 0, ""))
    try:
        value = _entry_of(job)(worker)
        pack((worker.ranks.global_rank, value), job.values[local_rank].number)
    except BaseException as error:  # noqa: BLE001  whatever ended it
        record = FailureRecord.of_exception(worker.ranks, error)
        _publish_failure(failure, record)
        if record.is_consequence:
            time.sleep(_SETTLE_S)
        exit_now(record.exit_status or 1)


def _publish_failure(descriptor: int, record: FailureRecord) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, record.to_json(), 0)


def _worker() -> WorkerContext:
    number = {name: int(os.environ[name]) for name in _RANK_VARIABLES}
    ranks = RankInfo(*number.values())
    return WorkerContext(ranks, address=(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))


# In the order of RankInfo's fields.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


def _own_variables() -> dict[str, str]:
    """Return what the agent has set for this rank, which a copy of the agent's environment must not hide."""
    prefixes = (*_RANK_VARIABLES, "ROLE_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def _entry_of(job: _Job) -> Entry:
    if job.packed_entry is None:
        if job.entry is None:
            raise ValueError("the job holds no function")
        return job.entry
    entry: Entry = unpack(job.packed_entry.number, copy=True)  # the agent may start another from it
    return entry


def _leave_with(agent_pid: int) -> None:
    """End this process as soon as the agent is gone, whatever it is doing."""
    try:
        agent: Any = os.pidfd_open(agent_pid)
    except (AttributeError, ProcessLookupError):  # no pidfds here, or it is gone already
        parent = multiprocessing.parent_process()
        agent = None if parent is None else parent.sentinel

    def wait() -> None:
        if agent is not None:
            select.select([agent], [], [])
        exit_now(1)

    threading.Thread(target=wait, name="rankwise-lifeline", daemon=True).start()

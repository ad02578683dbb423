"""`ElasticLauncher`: torch's elastic agent starts the ranks, and starts them again after a failure."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from rankwise.errors import ProcessGroupError, WorkerError
from rankwise.failures.record import FailureRecord, first_cause
from rankwise.launchers.context import Entry, Launcher, WorkerContext
from rankwise.launchers.multiprocess import create_job, refuse_where_impossible, returned_values
from rankwise.launchers.preconditions import shortages_named
from rankwise.launchers.script_place import count_launch
from rankwise.launchers.worker_main import JobSpec, bind_to_main_process, run_worker
from rankwise.processes.exit_codes import write_stderr
from rankwise.processes.memory_file import Descriptor, owned_descriptor, pack
from rankwise.processes.parent_death import ParentDeathPipe, end_with_writer
from rankwise.processes.signals import INTERRUPT_NOTICE, ROUTER, SignalRequest, exit_statuses_kept, stopped_by
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RestartInfo, note_restart
from rankwise.torch_internals import ELASTIC, check_torch

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_SETTLE_S = 0.5  # how much later a rank exits if its failure looks like a consequence of another rank's
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LEFT_TO_TORCH = signal.SIGQUIT  # torch insists on one signal
_STOP_TIMEOUT_S = 30  # for training ranks to reach a boundary and save after SIGTERM, as under torchrun
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# The agent does not report why it restarts its ranks; it only logs torch's exception.
_AGENT_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
_STOPPED = type(stopped_by(signal.SIGTERM)).__name__
_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Nodes:
    """The number of nodes of a job, and the place where their agents meet."""

    fewest: int = 1  # to start, or to continue after a failure
    most: int = 1
    endpoint: str = ""  # host and port of the first node's agent; empty for a job on one node
    run_id: str = ""  # the id that a job's agents share; empty for a random one
    own_address: Callable[[str], str] = str  # where this node listens, given the endpoint's host


@final
@dataclass(eq=False)
class ElasticLauncher(Launcher):
    """Run torch's elastic agent of this node: it starts the ranks, and starts all again when one fails."""

    copies_entry = True

    start_method: str
    local_world_size: int
    nodes: Nodes
    max_restarts: int  # after how many failures the ranks are started again
    grace_period_s: float  # from SIGTERM to SIGKILL; see `_STOP_TIMEOUT_S`
    init_timeout: timedelta  # for the agents to meet

    @property
    def has_other_ranks(self) -> bool:
        return bool(self.nodes.endpoint)

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Start, watch, restart, collect the values; see `Launcher.launch`."""
        count_launch()
        check_torch(ELASTIC)
        refuse_where_impossible(self.start_method)
        started_s = time.monotonic()
        with ExitStack() as cleanup:
            with shortages_named(self.local_world_size):
                job = self._prepare(entry, described, cleanup)
                with _agent_signals(), exit_statuses_kept(), _agent_log_filtered(job.note_exit):
                    failures = self._run(job)
            gc.collect()  # the agent, with the store that it hosts, is a cycle
            if failures:
                raise _worker_error(failures, job, started_s)
            return returned_values(job.written(), job.values, started_s)

    def _prepare(self, entry: Entry, described: Mapping[str, object], cleanup: ExitStack) -> _Job:
        spec = create_job(self.start_method, entry, described, cleanup)
        parent_pipe = ParentDeathPipe()
        cleanup.callback(parent_pipe.close)
        return _Job(
            spec,
            values=[owned_descriptor(cleanup) for _ in range(self.local_world_size)],
            failures=[owned_descriptor(cleanup) for _ in range(self.local_world_size)],
            parent_pipe=Descriptor(parent_pipe.worker_end),
            is_alone=not self.nodes.endpoint,
            key=b"" if self.nodes.endpoint else secrets.token_bytes(32),
        )

    def _run(self, job: _Job) -> Mapping[int, Any]:
        """Run the agent to its end; return torch's records of the ranks that failed, by global rank."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        try:
            elastic_launch(self._config(job), _work)(job)
        except ChildFailedError as error:
            return dict(error.failures)
        return {}

    def _config(self, job: _Job) -> LaunchConfig:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        # The import registers both rendezvous handlers with torch.
        from rankwise.launchers.elastic_rendezvous import LOOPBACK_HANDLER, NODES

        options: dict[str, Any] = {
            "min_nodes": self.nodes.fewest,
            "max_nodes": self.nodes.most,
            "nproc_per_node": self.local_world_size,
            "run_id": self.nodes.run_id or f"rankwise-{secrets.token_hex(8)}",
            "rdzv_backend": NODES if self.nodes.endpoint else LOOPBACK_HANDLER,
            "rdzv_endpoint": self.nodes.endpoint,
            "rdzv_configs": {
                "timeout": math.ceil(self.init_timeout.total_seconds()),
                "on_start": job.begin,
                "own_address": self.nodes.own_address,
            },
            "max_restarts": self.max_restarts,
            "monitor_interval": 0.1,
            "start_method": self.start_method,
            "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),  # ranks print where this process does
            "shutdown_timeout": max(_STOP_TIMEOUT_S, math.ceil(self.grace_period_s)),
            "signals_to_handle": _LEFT_TO_TORCH.name,
        }
        known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older versions lack the last one
        return LaunchConfig(**{name: value for name, value in options.items() if name in known})


@final
@dataclass
class _Job:
    """The data that each worker receives at each start."""

    spec: JobSpec
    values: list[Descriptor]  # memory files for each local rank's global rank and value
    failures: list[Descriptor]  # memory files for each local rank's failure record
    parent_pipe: Descriptor  # ends the workers with the agent
    is_alone: bool  # whether the job has one node
    key: bytes = field(repr=False)  # of the job, where it has one node
    unreported: list[FailureRecord] = field(default_factory=list)  # ends of this start without an exception
    start: RestartInfo = field(default_factory=RestartInfo)  # the same on all nodes, unlike an agent's count

    def records(self) -> list[FailureRecord]:
        """Return the failures that the ranks of the last start have reported."""
        return [each for each in self.written() if each.exception_type]

    def note_exit(self, pid: int, status: int) -> None:
        """Record the exit of a rank of the last start, unless it was reported. Runs on: the agent."""
        ended = [each for each in self.written() if each.pid == pid and not each.exception_type]
        now_s = time.monotonic()
        self.unreported += [dataclasses.replace(each, exit_status=status, at_s=now_s) for each in ended]

    def written(self) -> list[FailureRecord]:
        """Return each rank's record: empty from its start on, then the record of its failure."""
        texts = [os.pread(each.number, os.fstat(each.number).st_size, 0) for each in self.failures]
        records = []
        for text in filter(None, texts):
            with suppress(ProcessGroupError):  # the rank was killed while it wrote
                records.append(FailureRecord.from_json(text))
        return records

    def begin(self, start: RestartInfo) -> None:
        """Record which start it is; log a restart and its cause. Runs on: the agent."""
        self.start = start
        if start.number:
            _log.warning("All ranks start again (restart %d): %s", start.number, self._why())
        self.unreported.clear()

    def _why(self) -> str:
        unknown = "nodes came or went, or a rank was killed"
        if self.is_alone:
            unknown = "a rank ended without an exception"
        # When nodes join or leave, the agent stops the present ranks; that is not a failure.
        raised = [each for each in self.records() if each.exception_type != _STOPPED]
        if not (records := [*self.unreported, *raised]):
            return unknown
        cause = first_cause(records)
        return f"{unknown}; {cause.line()}" if cause.is_consequence else cause.line()


@contextmanager
def _agent_signals() -> Iterator[None]:
    """Let the agent end its ranks when a signal comes; raise `KeyboardInterrupt` or `SystemExit` for it.

    After the first Ctrl-C, as after SIGTERM, ranks that train stop after the step, with a checkpoint.
    Mutates: the handlers of SIGTERM, SIGINT, SIGHUP and SIGQUIT, and a variable, restored on exit.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    variable = os.environ.get(_SIGNALS_VARIABLE)
    was_interrupted = False

    def end(request: SignalRequest) -> None:
        nonlocal was_interrupted
        if request.number == signal.SIGINT:  # which the ranks ignore
            is_first, was_interrupted = not was_interrupted, True
            if is_first:
                write_stderr(INTERRUPT_NOTICE)
            raise SignalException("interrupted", sigval=signal.SIGTERM if is_first else signal.SIGKILL)
        if not request.is_repeat:
            raise SignalException(f"signal {request.number}", sigval=signal.Signals(request.number))

    try:
        numbers = set(_AGENT_SIGNALS) - {_LEFT_TO_TORCH}
        with ROUTER.subscribe(numbers, end, in_main_thread=True, calls_earlier_handler=False):
            yield
    except SignalException as error:
        if was_interrupted or error.sigval is signal.SIGINT:  # older versions of torch set their handlers
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        for number, handler in before.items():
            if is_main_thread and handler is not None:  # older versions of torch replace ignored ones too
                signal.signal(number, handler)
        os.environ.pop(_SIGNALS_VARIABLE, None)
        if variable is not None:
            os.environ[_SIGNALS_VARIABLE] = variable


@contextmanager
def _agent_log_filtered(on_exit: Callable[[int, int], None]) -> Iterator[None]:
    """Keep the agent from logging its own traceback for every rank that fails.

    It calls `on_exit` with pid and exit status of each rank that ended without an exception.
    Mutates: level and filters of loggers of torch, restored on exit.
    """
    from torch.multiprocessing import ProcessExitedException

    def filter_record(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ProcessExitedException):
            _, _, pid, exit_code, _ = error.__reduce__()[1]  # the attributes' names depend on torch's version
            on_exit(pid, exit_code)
        return record.levelno >= logging.CRITICAL

    with ExitStack() as restored:
        for logger in map(logging.getLogger, _AGENT_LOGGERS):
            restored.callback(logger.setLevel, logger.level)
            restored.callback(logger.removeFilter, filter_record)
            logger.setLevel(logging.ERROR)
            logger.addFilter(filter_record)
        yield


def _worker_error(failures: Mapping[int, Any], job: _Job, started_s: float) -> WorkerError:
    """Return the exception for a job that failed more often than it may."""
    records = job.records()
    reported = {record.pid for record in records}
    for global_rank, failure in failures.items():
        if failure.pid not in reported:
            record = FailureRecord(
                global_rank=global_rank,
                local_rank=failure.local_rank,
                node_rank=(global_rank - failure.local_rank) // len(job.values),
                pid=failure.pid,
                at_s=time.monotonic(),
                exit_status=failure.exitcode,
            )
            records.append(record)
    cause = first_cause(records)
    return cause.to_error(started_s, (), [record for record in records if record is not cause])


# In the order of RankInfo's fields.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# The variables that the agent sets for each worker.
_AGENT_VARIABLES = (*_RANK_VARIABLES, "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")


def _work(job: _Job) -> None:
    """Be one rank: the function that every started process runs, under torchrun's variables."""
    for number in _AGENT_SIGNALS:  # a fork inherits torch's handlers, which raise
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the agent's, whose program may block it
    end_with_writer(job.parent_pipe.number)
    bind_to_main_process()
    own = {name: value for name, value in os.environ.items() if name.startswith(_AGENT_VARIABLES)}
    job.spec.set_up_process(own)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(job.start.number)
    note_restart(job.start)
    ranks = RankInfo(*(int(os.environ[name]) for name in _RANK_VARIABLES))
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    worker = WorkerContext(ranks, address=address, key=job.key)
    values, failure = job.values[ranks.local_rank].number, job.failures[ranks.local_rank].number

    def write_failure(record: FailureRecord) -> None:
        os.ftruncate(failure, 0)
        os.pwrite(failure, record.to_json(), 0)

    def fail(error: BaseException) -> int:
        record = FailureRecord.of_exception(ranks, error)
        write_failure(record)
        if record.is_consequence:
            time.sleep(_SETTLE_S)
        return record.exit_status or 1

    write_failure(FailureRecord.of_rank(ranks, os.getpid(), exit_status=0, phase=""))
    run_worker(job.spec.run, worker, lambda value: pack(value, values), fail)

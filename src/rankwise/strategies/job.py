"""`Job`: one rank's state for the duration of one launch."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch.distributed import ProcessGroup

from rankwise.checkpoint import CheckpointIO
from rankwise.environments.network import LOOPBACK_INTERFACE, interface_toward
from rankwise.errors import hint_for, text_of
from rankwise.failures.classify import readable
from rankwise.failures.exchange import resolve_cause
from rankwise.failures.record import FailureRecord
from rankwise.gradient_sync.unused import explain_unused
from rankwise.launchers.context import Entry, Launcher, WorkerContext, torchrun_variables
from rankwise.monitoring import heartbeat
from rankwise.process_group import gloo_on_interface, interception, process_group
from rankwise.process_group.authentication import groups_authenticated
from rankwise.process_group.collective_check import CollectiveCheck
from rankwise.process_group.lone_calls import collectives_refused_after_failure, refuse_lone_call
from rankwise.processes.event_loop import signals_delivered_in_thread
from rankwise.processes.exit_codes import forked_children_exit
from rankwise.processes.fork_safety import SET_BY_DYNAMO
from rankwise.processes.signals import (
    ROUTER,
    JobStopped,
    SignalRequest,
    StoppedBySignal,
    ended_by,
    exit_by_signal,
)
from rankwise.ranks import is_in_rank_zero_section
from rankwise.strategies.config import GroupConfig
from rankwise.strategies.module_wrapping import WrappedModules

_log = logging.getLogger(__name__)


@final
@dataclass(eq=False)
class Job:
    """One rank of one launch. The worker creates it and closes it; it is never pickled.

    A strategy that is used without a launch, in processes that the user has connected, has one too.
    """

    worker: WorkerContext  # from the launcher
    is_launched: bool = True  # whether it belongs to a launch
    has_group: bool = True  # whether the strategy creates the process group, not the launched function
    check: CollectiveCheck | None = None  # compares each collective of the ranks before it runs
    modules: WrappedModules = field(default_factory=WrappedModules)  # the results of `setup_module`
    cleanup: ExitStack = field(default_factory=ExitStack)  # what `teardown` undoes, last first
    _failure: _Failure | None = None

    def connect(
        self, device: torch.device, backend: str, config: GroupConfig, stall_warning: timedelta
    ) -> None:
        """Connect this rank to the others, until `cleanup`. Collective."""
        ranks, enter = self.worker.ranks, self.cleanup.enter_context
        threads = torch.get_num_threads()
        self.cleanup.callback(torch.set_num_threads, threads)
        if ranks.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, min(threads, usable_cores() // ranks.local_world_size))  # this rank's share
        torch.set_num_threads(threads)
        interface: str | None = LOOPBACK_INTERFACE
        if not ranks.is_one_node:
            host = self.worker.meeting_host
            interface = None if host is None else interface_toward(host)
        enter(gloo_on_interface(interface))
        if ranks.world_size > 1:
            key = self.worker.job_key(config.init_timeout)
            enter(groups_authenticated(key, config.init_timeout))
        if self.has_group:
            self._join_group(device, backend, config, stall_warning)

    def _join_group(
        self, device: torch.device, backend: str, config: GroupConfig, stall_warning: timedelta
    ) -> None:
        heartbeat.report_phase("connecting", waits=True)
        worker, enter = self.worker, self.cleanup.enter_context
        store = worker.open_store(config.init_timeout)
        group = process_group(
            store,
            worker.ranks,
            backend,
            device,
            timeout=config.timeout,
            init_timeout=config.init_timeout,
            on_rendezvous=lambda places: enter(
                worker.start_monitors(places, config.init_timeout, stall_warning)
            ),
        )
        enter(group)
        worker.limit_store(config.timeout)
        if config.check_collectives and worker.ranks.world_size > 1:
            own_store = worker.open_another(store, config.init_timeout)
            self.check = CollectiveCheck(worker.ranks.global_rank, own_store, config.timeout)
            enter(interception.intercepted(self.check.compare))

    def guard(self, name: str, group: ProcessGroup | None = None) -> AbstractContextManager[None]:
        """Return the block for a collective; the supervisor sees that this rank waits in it.

        Raises where other ranks never call it: in code of rank zero alone, and in hooks after a failure.
        """
        if self.worker.ranks.world_size > 1 and (interception.observers or is_in_rank_zero_section()):
            refuse_lone_call(name, None if group is None else group.size())
        return heartbeat.blocked_in(name)

    @contextmanager
    def running(
        self, setup: Callable[[], None], teardown: Callable[[], None], checkpoint_io: CheckpointIO
    ) -> Iterator[None]:
        """Run the launched function in the block, between `setup` and `teardown`; report its failure."""
        worker = self.worker
        try:
            setup()
            with forked_children_exit():
                yield
            if self.check is not None:
                self.check.finish()
            checkpoint_io.teardown()
            if (exchange := worker.failure_exchange) is not None and not worker.ranks.is_one_node:
                exchange.wait_for_other_ranks()
        except BaseException as error:
            failure = self._failure or self._failure_of(error)
            worker.report_failure(failure.cause, failure.record)  # before the teardown, which may take long
            worker.leave()
            _finish_checkpoints(checkpoint_io)
            if failure.cause is error:
                raise
            if failure.cause is failure.error:  # and a hook has raised another error since
                raise failure.cause  # noqa: B904  its own cause stays
            raise failure.cause from None
        finally:
            self._failure = None  # its traceback refers to this frame
            heartbeat.report_phase(heartbeat.TEARDOWN)
            teardown()
            worker.close_monitor()
            heartbeat.report_phase("finished", waits=True)

    def report_failure(self, error: BaseException) -> None:
        """Report the exception before hooks of the user run, which may take long, or hang.

        From then on, until the job ends, this rank's collectives are refused: no other rank takes part. A
        stop for a signal is not a failure: all ranks run the hooks then.
        """
        if self._failure is not None or isinstance(error, StoppedBySignal):
            return
        failure = self._failure = self._failure_of(error)
        self.worker.report_failure(failure.cause, failure.record, is_early=True)
        if self.worker.ranks.world_size > 1:
            last = heartbeat.failure_time_of(error).heartbeat
            is_cut = isinstance(error, JobStopped) and last is not None and last.phase == heartbeat.OPTIMIZER
            self.cleanup.enter_context(collectives_refused_after_failure(was_in_optimizer_step=is_cut))

    def _failure_of(self, error: BaseException) -> _Failure:
        own = readable(error)
        own = explain_unused(own) or own
        if sys.version_info >= (3, 11) and type(own) is ValueError:
            if hint := hint_for("ValueError", text_of(own)):
                own.add_note(f"rankwise: {hint}")
        return _Failure(error, *resolve_cause(own, self.worker.ranks, self.worker.failure_exchange))


@final
class _Failure(NamedTuple):
    """A failure of this rank: the original exception, the one that it raises instead, and its record."""

    error: BaseException
    cause: BaseException
    record: FailureRecord


def launched_parts(
    strategy: object, function: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the launched function and its arguments, by the names that error messages use."""
    arguments = {f"argument {index} ({type(arg).__name__})": arg for index, arg in enumerate(args)}
    named = {f"argument {name!r}": value for name, value in kwargs.items()}
    return {"the launched function": function, "the strategy": strategy, **arguments, **named}


def launch_into(
    results: dict[int, Any],
    launcher: Launcher,
    entry: Entry,
    described: Mapping[str, object],
    rendezvous: str,
) -> None:
    """Launch, and put the values into `results`, also where a signal has stopped all ranks.

    Then raise SystemExit or KeyboardInterrupt.
    """
    needs_no_copy = launcher.runs_in_caller or launcher.copies_entry
    run = launcher.launch if needs_no_copy else partial(_launch_copies, launcher)
    try:
        results.update(run(entry, described, rendezvous))
    except StoppedBySignal as stopped:
        results.update(stopped.values)
        if launcher.runs_in_caller and isinstance(stopped, SystemExit):
            raise  # a job around this one stops, too
        raise ended_by(stopped.signal_number) from None


def _launch_copies(
    launcher: Launcher, entry: Entry, described: Mapping[str, object], rendezvous: str
) -> dict[int, Any]:
    """Launch an entry that every pickler copies, and that returns bytes; return the ranks' values."""
    from rankwise.launchers.process_state import ProcessState
    from rankwise.processes.memory_file import PickledByValue, unpack_bytes

    run = partial(_run_with_variables, entry, os.getpid())
    copied = PickledByValue(partial(ProcessState.of_this_process().run, run))
    returned = launcher.launch(copied, described, rendezvous)
    return {rank: unpack_bytes(value) for rank, value in returned.items()}


def _run_with_variables(entry: Entry, launching_pid: int, worker: WorkerContext) -> Any:
    """Run an entry as a rank with torchrun's variables, if the launcher has given it none."""
    if not worker.variables:
        worker.variables = torchrun_variables(worker.ranks, worker.address, launching_pid)
    return entry(worker)


def _finish_checkpoints(checkpoint_io: CheckpointIO) -> None:
    """Finish checkpoints that are being written, after a failure that ended the job; log another failure."""
    try:
        checkpoint_io.teardown()
    except Exception:  # noqa: BLE001  the failure that ended the job is raised
        _log.exception("A checkpoint could not be finished.")


@contextmanager
def sigterm_deferred(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Let a thread of `checkpoint_io` finish its checkpoint before SIGTERM ends this process, in the block.

    torch's agents send SIGTERM to all ranks as soon as one has failed, also to one that is blocked in C++. A
    second one, 2 s later or more, ends the process at once. Nothing changes where SIGTERM has a handler.
    """
    if type(checkpoint_io).on_saving_changed is CheckpointIO.on_saving_changed:  # it writes in no thread
        yield
        return
    deferred = _DeferredSigterm()
    checkpoint_io.on_saving_changed(deferred.on_saving_changed)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    default_action = ROUTER.subscribe([signal.SIGTERM], deferred.on_sigterm, is_default_action=True)
    with signals_delivered_in_thread(), default_action:
        yield


@final
class _DeferredSigterm:
    def __init__(self) -> None:
        self._is_saving = False
        self._is_due = False

    def on_saving_changed(self, is_saving: bool) -> None:
        heartbeat.report_saving(is_saving)
        self._is_saving = is_saving
        if self._is_due and not is_saving:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_sigterm(self, request: SignalRequest) -> None:
        is_second = self._is_due and not request.is_repeat
        # Set the flag, then read the other; `on_saving_changed` does the reverse. So one of them sees both.
        self._is_due = True
        if is_second or not self._is_saving:
            exit_by_signal(signal.SIGTERM)


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block."""
    before = {name: os.environ.get(name) for name in (*variables, SET_BY_DYNAMO)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if "sched_getaffinity" in os.__dict__:  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

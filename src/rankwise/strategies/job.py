"""`Job`: what a rank has for the duration of one launch; and the entry that runs a rank."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
import torch.distributed as dist

from rankwise.checkpoint import CheckpointIO
from rankwise.failures.classify import mark_propagated, start_exception_chain
from rankwise.failures.exchange import resolve_cause
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import TEARDOWN, blocked_in, report_phase, report_saving
from rankwise.process_group import collectives
from rankwise.process_group.collective_check import CollectiveCheck
from rankwise.process_group.rank_zero import refuse_in_rank_zero_section
from rankwise.processes.event_loop import signals_delivered_in_thread
from rankwise.processes.fork_safety import SET_BY_DYNAMO
from rankwise.processes.signals import ROUTER, SignalRequest, exit_by_signal
from rankwise.ranks import RankInfo, job_entry
from rankwise.strategies.module_wrapping import WrappedModules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_log = logging.getLogger(__name__)


@final
class Collectives:
    """Runs collectives, and reports to the supervisor that this rank waits in them.

    Every rank must call each of the methods, in the same order.

    Attributes:
        check: compares each collective of the ranks before it runs; None unless `checked` is active.
    """

    def __init__(self, ranks: RankInfo, default_group: Callable[[], ProcessGroup | None]) -> None:
        self._ranks = ranks
        self._default_group = default_group
        self.check: CollectiveCheck | None = None

    def run(
        self, function: Callable[..., T], value: object, group: ProcessGroup | None, *options: object
    ) -> T:
        """Run a collective of `rankwise.process_group` on a group; None is the default group."""
        with self.guard(function.__name__, group):
            return function(value, self._default_group() if group is None else group, *options)

    def broadcast(self, value: T, src: int) -> T:
        with self.guard("broadcast"):
            return collectives.broadcast(value, src)

    def count(self, decision: bool, device: torch.device) -> int:
        """Return on how many ranks of the job the decision is yes."""
        counter = torch.tensor(int(decision), device=device)
        with self.guard("reduce_boolean_decision"):
            return int(collectives.all_reduce(counter, reduce_op="sum"))

    @contextmanager
    def checked(
        self, worker: WorkerContext, store: dist.Store, timeout: timedelta, init_timeout: timedelta
    ) -> Iterator[None]:
        """Compare each collective of this process with the other ranks' in the block."""
        self.check = CollectiveCheck(
            self._ranks.global_rank, worker.open_another(store, init_timeout), timeout
        )
        try:
            with self.check.checking():
                yield
        finally:
            self.check = None

    def finish(self) -> None:
        """Check that no rank has more collectives to come, if they are compared."""
        if self.check is not None:
            self.check.finish()

    def guard(self, name: str, group: ProcessGroup | None = None) -> AbstractContextManager[None]:
        """Return the block for a collective.

        Raises:
            LifecycleError: in code that only rank zero runs, where other ranks would never call it.
        """
        if self._ranks.world_size > 1:
            refuse_in_rank_zero_section(name, None if group is None else group.size())
        return blocked_in(name)


def save_on_rank_zero(
    save: Callable[[], object], ranks: RankInfo, broadcast: Callable[[Exception | None], Exception | None]
) -> None:
    """Run a function that saves something on global rank 0; all ranks continue after it, or all raise."""
    error: Exception | None = None
    if ranks.is_global_zero:
        try:
            report_phase("checkpoint")
            save()
        except Exception as raised:  # noqa: BLE001  raised below, on all ranks
            error = raised
    error = broadcast(error)
    if error is not None:
        raise error if ranks.is_global_zero else mark_propagated(error)


@final
@dataclass(eq=False)
class Job:
    """One rank of one launch. The worker creates it and closes it; it is never pickled.

    A strategy that is used without a launch, in processes that the user has connected, has one too.

    Attributes:
        worker: what the launcher gives to this rank.
        device: of this rank.
        collectives: the collectives of the job's ranks.
        is_launched: whether it belongs to a launch.
        has_group: whether the strategy creates the process group, not the launched function.
        modules: what `setup_module` returned, and how to undo it.
        cleanup: what `close` undoes, last first.
    """

    worker: WorkerContext
    device: torch.device
    collectives: Collectives
    is_launched: bool = True
    has_group: bool = True
    modules: WrappedModules = field(default_factory=WrappedModules)
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def ranks(self) -> RankInfo:
        """The ranks of this process."""
        return self.worker.ranks

    def close(self) -> None:
        """Restore the process as it was when the job was created."""
        self.cleanup.close()


@final
@dataclass
class RankEntry:
    """The function that a launcher runs as each rank; picklable if the strategy and the arguments are."""

    strategy: Any  # a Strategy; its module imports this one
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    init_process_group: bool = True

    @start_exception_chain()
    def __call__(self, worker: WorkerContext) -> Any:
        """Run the launched function as the rank of `worker`; return its value."""
        job = self.strategy.attach(worker)
        job.has_group = self.init_process_group
        with sigterm_deferred(self.strategy.checkpoint_io):
            return self._run(job)

    @job_entry
    def _run(self, job: Job) -> Any:
        worker = job.worker
        try:
            self.strategy.setup_environment()
            value = self.function(self.strategy, *self.args, **self.kwargs)
            job.collectives.finish()
            self.strategy.checkpoint_io.teardown()
            if (exchange := worker.failure_exchange) is not None and not exchange.is_one_node:
                exchange.wait_for_other_ranks()
            return value
        except BaseException as error:
            translated = self.strategy.translate_error(error)
            cause, record = resolve_cause(translated, self.strategy.ranks, worker.failure_exchange)
            worker.report_failure(cause, record)  # before the teardown, which may take long
            self._finish_checkpoints()
            if cause is error:
                raise
            raise cause from None
        finally:
            report_phase(TEARDOWN)
            self.strategy.teardown()
            worker.close_monitor()
            report_phase("finished", waits=True)

    def _finish_checkpoints(self) -> None:
        try:
            self.strategy.checkpoint_io.teardown()
        except Exception:  # noqa: BLE001  the failure that ended the job is raised
            _log.exception("A checkpoint could not be finished.")

    def described(self) -> dict[str, object]:
        """Return the parts of the entry by the names that error messages use for them."""
        arguments = {f"argument {index} ({type(arg).__name__})": arg for index, arg in enumerate(self.args)}
        return {
            "the launched function": self.function,
            "the strategy": self.strategy,
            **arguments,
            **{f"argument {name!r}": value for name, value in self.kwargs.items()},
        }


@contextmanager
def sigterm_deferred(checkpoint_io: CheckpointIO) -> Iterator[None]:
    """Let a thread of `checkpoint_io` finish its checkpoint before SIGTERM ends this process, in the block.

    torch's agents send SIGTERM to all ranks as soon as one has failed. A second one, 2 s later or more, ends
    the process at once; so does the first where nothing is being written. This holds while the main thread is
    blocked in C++ too, as in a collective. Where something else handles SIGTERM, as the loop of a fit does,
    nothing changes.

    Mutates: the handler of SIGTERM and the signal wake-up descriptor, restored on exit.
    """
    deferred = _DeferredSigterm()
    checkpoint_io.on_saving_changed(deferred.on_saving_changed)
    writes_in_a_thread = type(checkpoint_io).on_saving_changed is not CheckpointIO.on_saving_changed
    if not writes_in_a_thread or not _ends_by_default():
        yield
        return
    default_action = ROUTER.replace_default_action(signal.SIGTERM, deferred.on_sigterm)
    with signals_delivered_in_thread(), default_action:
        yield


def _ends_by_default() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@final
class _DeferredSigterm:
    def __init__(self) -> None:
        self._is_saving = False
        self._is_due = False

    def on_saving_changed(self, is_saving: bool) -> None:
        report_saving(is_saving)
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


def threads_per_rank(local_world_size: int) -> int:
    """Return this rank's share of torch's threads; all of them if it is alone or `OMP_NUM_THREADS` is set."""
    threads = torch.get_num_threads()
    if local_world_size == 1 or "OMP_NUM_THREADS" in os.environ:
        return threads
    return max(1, min(threads, usable_cores() // local_world_size))

"""`Launcher`, and the `WorkerContext` of a rank: its place in the job, store and channel."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

from rankwise.errors import ProcessGroupError
from rankwise.failures.classify import make_printable
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.processes.signals import Interruptible, StoppedBySignal
from rankwise.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store

    from rankwise.failures.exchange import FailureExchange
    from rankwise.launchers.supervisor import SupervisionOptions
    from rankwise.monitoring.rank_monitor import RankMonitor
    from rankwise.process_group.step_agreement import StopAgreement
    from rankwise.stores.rendezvous import RankIdentity

Entry = Callable[["WorkerContext"], Any]


class Launcher(ABC):
    """Start processes, and run one function in each of them as a rank.

    Derive from it for `DDPStrategy(launcher=...)`; only `launch` has to be written. Such a launcher starts
    all ranks of the job.

    Attributes:
        runs_in_caller: whether the calling process is a rank itself, so that the function changes the
            caller's own objects.
        copies_entry: whether `launch` itself gives each process a copy of the entry and the state of this
            process. If not, `launch` gets an entry that every pickler copies, and that returns bytes.
        has_channels: whether ranks have a channel to a supervisor, over which they can meet privately.
        all_ranks: the ranks to start; set by `bound_to`.
        options: how ranks are started, watched and ended, as far as the launcher does that; set by
            `bound_to`.
    """

    runs_in_caller: ClassVar[bool] = False
    copies_entry: ClassVar[bool] = False
    has_channels: ClassVar[bool] = False
    all_ranks: tuple[RankInfo, ...]
    options: SupervisionOptions

    def bound_to(self, ranks: tuple[RankInfo, ...], options: SupervisionOptions) -> Launcher:
        """Return a copy for the ranks of one strategy; a subclass may refuse them here."""
        bound = copy.copy(self)
        bound.all_ranks, bound.options = ranks, options
        return bound

    @property
    def has_other_ranks(self) -> bool:
        """Whether processes of other ranks exist before `launch`, and would wait for this one."""
        return False

    def context_between_jobs(self) -> WorkerContext | None:
        """Return this rank's context if it continues with other ranks after a job, or None."""
        return None

    @abstractmethod
    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Run `entry(worker)` once per rank, each in its process; return the values by global rank.

        Args:
            entry: the function to run; it sets up and tears down.
            described: the parts of `entry` by the names that error messages use for them.
            rendezvous: `"private"` or `"tcp"`; without channels there is no difference.

        Raises:
            LaunchRefusedError: when this launcher cannot work here; nothing was started.
            NotPicklableError: when a part cannot be pickled; nothing was started.
            WorkerError: when a rank failed; all others have ended by then.
        """


@final
@dataclass
class WorkerContext:
    """The arguments of a function that a launcher runs as a rank."""

    ranks: RankInfo
    variables: Mapping[str, str] = field(default_factory=dict)  # torchrun's; empty where they are set already
    address: tuple[str, int] | None = None  # of the store; None where it is private, or not needed
    hosts_store: bool = False  # whether this rank has to host the store itself
    store_outlives: bool = False  # it may hold keys of an earlier start, as an elastic agent's does
    channel: RankChannel | None = None  # to the supervisor; None where nothing was launched (`inline`)
    supervisor_host: str = ""  # where one supervisor, on another host, has the channels of all ranks
    clock_offset_s: float = 0.0  # the supervisor's monotonic clock less this host's
    key: bytes = field(default=b"", repr=False)  # of the job, which only its ranks have
    job: int = 1  # counts the jobs of this group of processes from 1 on; keeps their keys apart in the store
    on_stop: Callable[[], None] | None = None  # runs in another thread, before this rank is interrupted
    failure_exchange: FailureExchange | None = None  # with ranks that this node's supervisor does not see
    _has_reported: bool = False
    _start: int = 0
    _monitor: RankMonitor | None = None
    # A prefix store does not keep the Python object of the store below it; neither does a group.
    _monitor_store: Store | None = None
    _store: Store | None = None

    def open_store(self, timeout: timedelta) -> Store:
        """Return the store through which the ranks of this job meet.

        Raises:
            RendezvousTimeoutError: when its host, or the ranks of this start, cannot be reached in time.
        """
        from rankwise.stores.rendezvous import find_restart
        from rankwise.stores.tcp import open_store

        ask = None if self.channel is None else self.channel.ask_store
        self._store = open_store(ask, self.address, hosts=self.hosts_store, timeout=timeout)
        if self.store_outlives and self.address is not None:
            self._start = find_restart(self.address, self._store, self.ranks, timeout).number
        return self._of_this_job(self._store, timeout)

    def job_key(self, timeout: timedelta) -> bytes:
        """Return the key that only this job's ranks have: the launcher's, or else the user's; may be empty.

        Raises:
            ConfigurationError: if the user's key can be guessed.
        """
        from rankwise.stores.private import PrivateStore
        from rankwise.stores.sealed import job_key_of_environment

        if not self.key and self.channel is not None and self.ranks.is_one_node:
            store = PrivateStore(self.channel.ask_store, timeout)  # also where the ranks meet in a TCP store
            self.key = store.compare_set("job_key", "", secrets.token_hex(32))
        return self.key or job_key_of_environment()

    @property
    def meeting_host(self) -> str | None:
        """The host at which all ranks meet; None if that is this one, or unknown."""
        return self.supervisor_host or (None if self.address is None else self.address[0])

    def limit_store(self, timeout: timedelta) -> None:
        """Set the store's timeout for the time after the rendezvous, for the monitor too."""
        for store in filter(None, (self._store, self._monitor_store)):
            store.set_timeout(timeout)

    def agree_on_stopping(self, timeout: timedelta) -> StopAgreement:
        """Return this rank's part in the agreement on when to stop; `timeout` is for the answers."""
        from rankwise.process_group.step_agreement import StopAgreement

        monitor = None if self.ranks.world_size == 1 else self._open_monitor(timeout)
        return StopAgreement(self.ranks, monitor, timeout)

    def monitor_for_changes(self, timeout: timedelta) -> RankMonitor | None:
        """Return this rank's monitor; None if the ranks share no store."""
        is_shared = self.channel is not None or self.address is not None
        return self._open_monitor(timeout) if is_shared and self.ranks.world_size > 1 else None

    @contextmanager
    def start_monitors(
        self, identities: Sequence[RankIdentity], timeout: timedelta, stall_warning: timedelta
    ) -> Iterator[None]:
        """Exchange status and failures with other ranks in the block, unless a supervisor sees all ranks.

        `identities` has all ranks by global rank, or none where they have not met through the job's store.
        """
        from rankwise.failures.exchange import FailureExchange, reply_to_status_queries
        from rankwise.monitoring.rank_monitor import PollingMonitor
        from rankwise.monitoring.stragglers import StragglerMonitor

        if len(identities) < 2 or not isinstance(monitor := self._open_monitor(timeout), PollingMonitor):
            yield
            return
        own, is_supervised = identities[self.ranks.global_rank], self.channel is not None
        self.failure_exchange = FailureExchange(monitor.store, identities, own)
        self.failure_exchange.subscribe(monitor, self._on_remote_failure)
        reply_to_status_queries(monitor, own, shows_stacks=not is_supervised)
        warn_after_s = stall_warning.total_seconds()
        stragglers = StragglerMonitor(identities, own, warn_after_s=warn_after_s, is_supervised=is_supervised)
        monitor.call_every(stragglers.interval_s, stragglers.look)
        try:
            yield
        finally:
            self.close_monitor()
            if self.hosts_store:
                self.failure_exchange.wait_until_read()
            self.failure_exchange = None

    def close_monitor(self) -> None:
        """End this rank's monitor, if the job has started it."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _open_monitor(self, timeout: timedelta) -> RankMonitor:
        from rankwise.monitoring.rank_monitor import ChannelMonitor, PollingMonitor
        from rankwise.stores.private import PrivateStore
        from rankwise.stores.tcp import job_prefix

        if self._monitor is None:
            rank, size, channel = self.ranks.global_rank, self.ranks.world_size, self.channel
            if channel is not None and (self.ranks.is_one_node or self.supervisor_host):
                self._monitor_store = PrivateStore(channel.ask_store, timeout)
                store = self._of_this_job(self._monitor_store, timeout)
                prefix = job_prefix(self.job, self._start)
                self._monitor = ChannelMonitor(rank, store, prefix, channel.post_store)
            else:
                opened = self._store
                store = self.open_store(timeout) if opened is None else self._of_this_job(opened, timeout)
                self._monitor = PollingMonitor(rank, size, store, partial(self.open_another, store, timeout))
        return self._monitor

    def _on_remote_failure(self, text: bytes) -> None:
        """Report another node's failure to the supervisor; it sees failures on this node itself."""
        if self.channel is None:
            return
        try:
            record = FailureRecord.from_json(text)
        except ProcessGroupError as damage:
            self.report_failure(damage)
            return
        if record.node_rank != self.ranks.node_rank:
            record = dataclasses.replace(record, at_s=time.monotonic())  # each node has a clock of its own
            self.channel.send(Kind.ELSEWHERE, record.to_json())

    def open_another(self, store: Store, timeout: timedelta) -> Store:
        """Return another client of the job's store: threads that share one wait for each other."""
        from rankwise.stores.tcp import open_another

        if self.address is None:
            return store  # several threads can use a private store at once
        return self._of_this_job(open_another(self.address, timeout), timeout)

    def _of_this_job(self, store: Store, timeout: timedelta) -> Store:
        from rankwise.stores.tcp import store_of_job

        key = b"" if self.address is None else self.job_key(timeout)  # a private store needs none
        return store_of_job(store, self.job, self._start, key=key)

    def report_failure(
        self, error: BaseException, record: FailureRecord | None = None, *, is_early: bool = False
    ) -> None:
        """Report the failure of this rank, once: to the supervisor, or to an agent in its error file.

        Before the group ends, because the other ranks fail then too. The supervisor gets `record`, if given.
        `is_early` is whether hooks of the user follow, and then another call; `leave` ends them.
        """
        if self._has_reported or isinstance(error, StoppedBySignal):
            return  # stopping is not a failure: every rank stops at the same step
        if self.channel is not None:
            record = FailureRecord.of_exception(self.ranks, error) if record is None else record
            record = record.on_clock_of(self.clock_offset_s, has_met=self.failure_exchange is not None)
            self.channel.send(Kind.FAILURE, record.to_json())
        elif record is not None and record.is_consequence and is_early:
            return  # the error file of a consequence is written late: see `_write_error_file`
        else:
            make_printable(error)  # torch's agent and Python print it
            if isinstance(error, Exception) and "TORCHELASTIC_ERROR_FILE" in os.environ:
                _write_error_file(error, record)
        self._has_reported = True  # not before: a signal handler may raise meanwhile, which is reported

    def leave(self) -> None:
        """Report that the hooks after this rank's failure have ended."""
        if self.channel is not None and self._has_reported:
            self.channel.send(Kind.LEFT)

    def run(self, entry: Entry, finish: Callable[[Any], None]) -> Any:
        """Run `entry` as this rank, then `finish` with its value, also after a stop; see `running`."""
        with self.running(finish) as run:
            try:
                run.value = entry(self)
            except StoppedBySignal as stopped:
                finish(stopped.value)
                raise
        return run.value

    @contextmanager
    def running(self, finish: Callable[[Any], None]) -> Iterator[RankRun]:
        """Be this rank in the block, then call `finish` with the block's value; report how it ended.

        Raises:
            JobStopped: after STOP from the supervisor. Anything that the block raises.
            StoppedBySignal: when all ranks have stopped for a signal.
        """
        channel, run = self.channel, RankRun(self)
        if channel is None:
            yield run
            finish(run.value)
            return
        try:
            with Interruptible() as block:
                channel.call_on_stop(partial(self._on_stop, block))
                yield run
                finish(run.value)
        except StoppedBySignal as stopped:
            channel.send(Kind.STOPPED, b"%d" % stopped.signal_number)
            raise
        except BaseException as error:
            self.report_failure(error)
            self.leave()
            raise
        finally:
            channel.call_on_stop(None)

    def _on_stop(self, block: Interruptible) -> None:
        if self.on_stop is not None:
            self.on_stop()
        block.interrupt()


@final
@dataclass
class RankRun:
    """The data that a launcher exchanges with the block that runs as a rank."""

    worker: WorkerContext  # the rank's place in the job
    value: Any = None  # set by the block: what the rank returns
    # After the block: every local rank's value, by global rank.
    values: dict[int, Any] = field(default_factory=dict)


class CallerLauncher(Launcher):
    """A launcher whose calling process is a rank itself, for a function or for the rest of the script."""

    runs_in_caller = True

    @abstractmethod
    def running(self, rendezvous: str) -> AbstractContextManager[RankRun]:
        """Return the block in which this process is a rank of the next job; raises as `launch` does."""

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Run `entry` as this process's rank, wait for the others; see `Launcher.launch`."""
        with self.running(rendezvous) as run:
            run.value = entry(run.worker)
        return run.values


def _write_error_file(error: Exception, record: FailureRecord | None) -> None:
    """Write the error file, in which torch's agent looks for the failure of a rank."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if record is not None and record.is_consequence:
        time.sleep(1)  # agents compare whole seconds: the rank that failed first must be earlier
    get_error_handler().record_exception(error)


def torchrun_variables(
    ranks: RankInfo, address: tuple[str, int] | None, launching_pid: int | None = None
) -> dict[str, str]:
    """Return the variables that torchrun gives its workers; `MASTER_*` only if something listens there.

    The process id of the launching process, by default this one, names the run.
    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    variables: dict[str, object] = {
        "RANK": ranks.global_rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        "GROUP_RANK": ranks.node_rank,
        "GROUP_WORLD_SIZE": ranks.num_nodes,
        "ROLE_RANK": ranks.global_rank,
        "ROLE_WORLD_SIZE": ranks.world_size,
        "ROLE_NAME": "default",
    }
    if address is not None:
        variables |= {
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
            # Every rank is a client of the launching process's store, as under torchrun's agent.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": f"rankwise-{launching_pid or os.getpid()}",
        }
    return {name: str(value) for name, value in variables.items()}


@final
@dataclass(frozen=True)
class ContextDescription:
    """The contents of a re-run script's environment variable; the last three are descriptors."""

    inode: int  # of the channel's socket
    ranks: RankInfo
    variables: dict[str, str]
    address: tuple[str, int] | None
    channel: int
    heartbeat: int
    values: int


def describe_context(worker: WorkerContext, descriptors: Mapping[str, int]) -> str:
    """Return the text of the environment variable from which a re-run script is attached."""
    inode = os.fstat(descriptors["channel"]).st_ino
    context = ContextDescription(inode, worker.ranks, dict(worker.variables), worker.address, **descriptors)
    return json.dumps(dataclasses.asdict(context))

"""Being a worker: set up the process, run the entry as a rank, report how it ended, exit.

A re-run script imports this module before torch.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, final

from rankwise import start
from rankwise.errors import RendezvousTimeoutError
from rankwise.failures.classify import start_exception_chain
from rankwise.launchers import script_place
from rankwise.launchers.channel import Kind, RankChannel
from rankwise.launchers.context import ContextDescription, Entry, RankRun, WorkerContext
from rankwise.launchers.script_place import RunningScript
from rankwise.monitoring.heartbeat import LEAVING, report_phase, write_heartbeat_to
from rankwise.monitoring.stacks import write_stacks_on_signal
from rankwise.processes import parent_death
from rankwise.processes.exit_codes import call_at_exit, exit_now, skip_last_collections
from rankwise.processes.signals import StoppedBySignal, ignore_interrupts_in_workers
from rankwise.processes.started_process import is_suspended
from rankwise.ranks import RankInfo
from rankwise.start import CONTEXT_VARIABLE
from rankwise.stores.values import decoded

if TYPE_CHECKING:
    from rankwise.processes.memory_file import Descriptor

_CHECKS = 8  # within its time limit, of whether the main process is suspended


@final
@dataclass
class JobSpec:
    """The data that every worker of a launched function receives."""

    entry: Entry | Descriptor  # the function, or a memory file with the pickled function
    start_method: str  # multiprocessing's default in the launching process
    environ: dict[str, str] | None = None  # of the launching process, where the worker does not inherit it

    def set_up_process(self, own_variables: Mapping[str, str]) -> None:
        """Set the state that this process does not inherit; `own_variables` override its environment."""
        multiprocessing.set_start_method(self.start_method, force=True)
        if self.environ is not None:
            os.environ.clear()
            os.environ.update({**self.environ, **own_variables})

    def run(self, worker: WorkerContext) -> Any:
        """Run the function as the rank that `worker` describes."""
        from rankwise.processes.memory_file import Descriptor, unpack

        entry = self.entry
        return (unpack(entry.number, copy=False) if isinstance(entry, Descriptor) else entry)(worker)


def bind_to_main_process() -> None:
    """End child processes when this process ends, and leave SIGINT to the main process."""
    parent_death.end_children_with_this_process()
    ignore_interrupts_in_workers()


def open_channel(sock: socket.socket, heartbeat: int) -> RankChannel:
    """Connect this process to its supervisor: it ends when the launching process does."""
    bind_to_main_process()
    call_at_exit(skip_last_collections)
    write_heartbeat_to(heartbeat)
    write_stacks_on_signal()
    channel = RankChannel(sock, on_lost=partial(exit_now, 1))
    channel.send(Kind.HELLO)
    return channel


@start_exception_chain()
def run_worker(
    entry: Entry,
    worker: WorkerContext,
    pack_value: Callable[[Any], None],
    on_failure: Callable[[BaseException], int],
) -> None:
    """Run a job's function as a rank; return after success, and after a stop at the supervisor's request.

    `pack_value` takes the return value; `on_failure` takes the exception, and returns the exit code.
    """
    try:
        worker.run(entry, finish=pack_value)
        if worker.channel is not None:
            worker.channel.send(Kind.DONE)
    except BaseException as error:  # noqa: BLE001  whatever ended it
        if worker.channel is None or not isinstance(error, StoppedBySignal):
            exit_now(on_failure(error))


@final
@dataclass
class InheritedContext(RunningScript):
    """The rank of a re-run script: the state that its jobs share, the file for values, its jobs so far."""

    ranks: RankInfo
    variables: dict[str, str]
    address: tuple[str, int] | None
    channel: RankChannel
    values: int
    jobs: int = 0
    pid: int = field(default_factory=os.getpid)  # a process that this one forks is not the rank

    @contextmanager
    def running(self, timeout_s: float | None) -> Iterator[RankRun]:
        """Run one job, as this rank in the block, until it is over on every rank; see `_wait_until_over`.

        After a failure this raises `SystemExit`: the main process raises the exception.
        """
        self.jobs += 1
        call_at_exit(report_phase, LEAVING)
        worker = WorkerContext(self.ranks, self.variables, self.address, channel=self.channel, job=self.jobs)

        def finish(value: object) -> None:
            from rankwise.processes.memory_file import pack

            try:
                pack(value, self.values)
            except Exception:  # noqa: BLE001  pickling runs the user's code
                os.ftruncate(self.values, 0)  # the value stays in this process
            self.channel.send(Kind.DONE)
            _wait_until_over(self.channel, timeout_s)

        try:
            with worker.running(finish) as run:
                yield run
            run.values = {self.ranks.global_rank: run.value}
        except StoppedBySignal as stopped:  # the main process raises the signal's exception
            raise SystemExit(128 + stopped.signal_number) from None
        except BaseException:  # noqa: BLE001  whatever ended it
            raise SystemExit(1) from None


def attach(description: str) -> None:
    """Become the worker that `describe_context` described: this process ends when the main process does.

    Does nothing in a program that such a worker has started, which has the variable, but not the channel.
    Mutates: the handler of SIGINT, which the main process handles; and, when `rankwise.seed` is imported, the
    random state.
    """
    source = f"the environment variable {CONTEXT_VARIABLE}"
    found = decoded(ContextDescription, description, source, "unset it: only rankwise sets it.")
    try:
        if os.fstat(found.channel).st_ino != found.inode:
            return
    except (OSError, OverflowError):
        return
    for descriptor in (found.channel, found.heartbeat, found.values):
        os.set_inheritable(descriptor, False)
    start.main_random_state = partial(_random_state_in, found.values)
    channel = open_channel(socket.socket(fileno=found.channel), found.heartbeat)
    own = (found.ranks, found.variables, found.address)
    script_place.running = InheritedContext(*own, channel, found.values)


def _random_state_in(values: int) -> Any:
    """Return the random state of the main process at its import, which it has packed."""
    from rankwise.processes.memory_file import unpack

    return pickle.loads(unpack(values, copy=True))


def _wait_until_over(channel: RankChannel, timeout_s: float | None) -> None:
    """Wait until the job is over on every rank; raise if the main process is suspended for `timeout_s`.

    Nothing else could end this wait then. A main process that runs may take any time.
    """
    suspended_at_s: float | None = None
    while not channel.is_over_within(None if timeout_s is None else timeout_s / _CHECKS):
        now_s = time.monotonic()
        if timeout_s is None or not is_suspended(os.getppid()):
            suspended_at_s = None
        elif suspended_at_s is None:
            suspended_at_s = now_s
        elif now_s - suspended_at_s > timeout_s:
            raise RendezvousTimeoutError("the main process, which is suspended", timeout_s)

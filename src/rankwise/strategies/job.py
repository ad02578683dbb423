"""`Job`: what a rank has for the duration of one launch; and the entry that runs a rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from rankwise.failures.classify import start_exception_chain
from rankwise.failures.exchange import resolve_cause, wait_for_other_nodes
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import TEARDOWN, report_phase
from rankwise.ranks import RankInfo, job_entry
from rankwise.strategies.collectives import Collectives
from rankwise.strategies.deferred_sigterm import sigterm_deferred
from rankwise.strategies.module_wrapping import WrappedModules

_log = logging.getLogger(__name__)
# torch sets this variable when the first optimizer or wrapper imports its compiler.
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"


@final
@dataclass(eq=False)
class Job:
    """One rank of one launch. The worker creates it and closes it; it is never pickled.

    Attributes:
        worker: what the launcher gives to this rank.
        device: of this rank.
        collectives: the collectives of the job's ranks.
        has_group: whether the strategy creates the process group, not the launched function.
        modules: what `setup_module` returned, and how to undo it.
        cleanup: what `close` undoes, last first.
    """

    worker: WorkerContext
    device: torch.device
    collectives: Collectives
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
        self.strategy.attach(worker)
        self.strategy.job.has_group = self.init_process_group
        with sigterm_deferred(self.strategy.checkpoint_io):
            return self._run(worker)

    @job_entry
    def _run(self, worker: WorkerContext) -> Any:
        try:
            self.strategy.setup_environment()
            value = self.function(self.strategy, *self.args, **self.kwargs)
            self.strategy.before_finish()
            self.strategy.checkpoint_io.teardown()
            wait_for_other_nodes(worker.failure_exchange)
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


# ------------------------------------------------------------------------------------- process state


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block."""
    before = {name: os.environ.get(name) for name in (*variables, _SET_BY_TORCH)}
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

"""A rank's part in a job: the process state around it, its failures, its end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.failures.classify import start_exception_chain
from rankwise.failures.exchange import resolve_cause, wait_for_other_nodes
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import TEARDOWN, report_phase
from rankwise.ranks import set_rank_zero_only
from rankwise.strategies.deferred_sigterm import sigterm_deferred

if TYPE_CHECKING:
    from rankwise.strategies.base import Strategy

# torch sets this one when the first optimizer or wrapper imports its compiler.
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables in the block, and those of before after it."""
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


@contextmanager
def rank_zero_set(global_rank: int) -> Iterator[None]:
    """Have `rank_zero_only` know this rank in the block."""
    before = set_rank_zero_only(global_rank)
    try:
        yield
    finally:
        set_rank_zero_only(before)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if "sched_getaffinity" in os.__dict__:  # Linux; elsewhere a process cannot be kept to some of the cores
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads_shared_by(local_world_size: int) -> Iterator[None]:
    """Share this machine's cores between the local ranks, unless `OMP_NUM_THREADS` says otherwise."""
    before = torch.get_num_threads()
    if local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(before, usable_cores() // local_world_size)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


_log = logging.getLogger(__name__)


@final
@dataclass
class RankEntry:
    """What a strategy gives to its launcher; picklable where the strategy and the arguments are."""

    strategy: Strategy
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @start_exception_chain()
    def __call__(self, worker: WorkerContext) -> Any:
        """Run as the rank that `worker` says."""
        self.strategy.attach(worker)
        with sigterm_deferred(self.strategy.checkpoint_io):
            return self._run(worker)

    def _run(self, worker: WorkerContext) -> Any:
        try:
            self.strategy.setup_environment()
            value = self.function(self.strategy, *self.args, **self.kwargs)
            self.strategy.before_finish()
            self.strategy.checkpoint_io.teardown()
            wait_for_other_nodes(worker.failure_exchange)
            return value
        except BaseException as error:
            translate_error = self.strategy.translate_error(error)
            translate_error, record = resolve_cause(
                translate_error, self.strategy.ranks, worker.failure_exchange
            )
            worker.report_failure(translate_error, record)  # before the clean-up, which takes its time
            self._finish_checkpoints()
            if translate_error is error:
                raise
            raise translate_error from None
        finally:
            report_phase(TEARDOWN)
            self.strategy.teardown()
            worker.close_monitor()
            report_phase("finished", waits=True)

    def _finish_checkpoints(self) -> None:
        try:
            self.strategy.checkpoint_io.teardown()
        except Exception:  # noqa: BLE001  what ended the job is raised
            _log.exception("A checkpoint could not be finished.")

    def described(self) -> dict[str, object]:
        """Return the parts by the names that the user knows them by."""
        arguments = {f"argument {index} ({type(arg).__name__})": arg for index, arg in enumerate(self.args)}
        return {
            "the launched function": self.function,
            "the strategy": self.strategy,
            **arguments,
            **{f"argument {name!r}": value for name, value in self.kwargs.items()},
        }

"""`RankCollectives`: a strategy's ranks, groups and collectives; shared errors; writing a checkpoint."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.checkpoint.base import as_checkpoint_error
from rankwise.compatibility.names import STRATEGY_ATTRIBUTES, MissingAttribute, missing_attributes
from rankwise.errors import (
    CheckpointError,
    LifecycleError,
    RankwiseError,
    RankZeroFailedError,
    RendezvousTimeoutError,
)
from rankwise.failures.classify import mark_propagated
from rankwise.failures.record import FailureRecord
from rankwise.launchers import Launcher, WorkerContext
from rankwise.monitoring.heartbeat import report_phase, saving_in_hook_reported
from rankwise.process_group import collectives, default_backend, objects, rank_zero_first
from rankwise.process_group.lone_calls import awaited_between_jobs, is_after_failure, refuse_partly_updated
from rankwise.ranks import RankInfo, warn
from rankwise.strategies.config import GroupConfig, PartField
from rankwise.strategies.job import Job

T = TypeVar("T")


class RankCollectives(ABC):
    """The ranks of a strategy, and what they do together.

    Every rank must call each collective, in the same order. A group of None is `data_parallel_group`.

    Attributes:
        ranks: the ranks of this process; in a main process that is not a rank, local rank 0's.
        global_rank, local_rank, node_rank, world_size, local_world_size, num_nodes, is_global_zero: of ranks.
        root_device: this process's device.
        timeout: how long a collective may take.
        sync_batchnorm: whether batch normalisation uses the batches of all ranks in training.
        init_timeout, check_collectives: as the arguments. All four may be set until `bind`.
    """

    vars().update(missing_attributes("Strategy", STRATEGY_ATTRIBUTES))

    group_config: GroupConfig
    timeout = PartField[timedelta]("group_config")
    init_timeout = PartField[timedelta]("group_config")
    check_collectives = PartField[bool]("group_config")
    sync_batchnorm = PartField[bool]("group_config")
    ranks = PartField[RankInfo]("placement")
    root_device = PartField[torch.device]("placement")
    global_rank = PartField[int]("placement.ranks")
    local_rank = PartField[int]("placement.ranks")
    node_rank = PartField[int]("placement.ranks")
    world_size = PartField[int]("placement.ranks")
    local_world_size = PartField[int]("placement.ranks")
    num_nodes = PartField[int]("placement.ranks")
    is_global_zero = PartField[bool]("placement.ranks")

    def __getattr__(self, name: str) -> Any:
        """Raise the error that says what is missing."""
        attribute = getattr(type(self), name, None)
        if isinstance(attribute, PartField):
            try:
                return attribute.read(self)
            except LifecycleError as error:
                raise LifecycleError(name, error.state, error.needed, error.remedy, "read") from None
        if isinstance(attribute, MissingAttribute):
            return attribute.__get__(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    @abstractmethod
    def _current_job(self) -> Job:
        """The job whose supervisor sees that this rank waits in a collective."""

    @property
    def job_group(self) -> dist.ProcessGroup | None:
        """All ranks of the job, as the `group` of a collective of this strategy."""
        return dist.group.WORLD

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the data; None for all. Wrapping, reducing and sampling use it."""
        return None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How samplers split the data: `num_replicas` and `rank`. Override it to split it in another way."""
        group = self.data_parallel_group
        if group is None or self.world_size == 1:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": dist.get_world_size(group), "rank": dist.get_rank(group)}

    @property
    def process_group_backend(self) -> str:
        """The back end of the collectives."""
        return self.group_config.process_group_backend or default_backend(self.root_device.type)

    def _collective(
        self, function: Callable[..., T], value: object, group: dist.ProcessGroup | None, *options: object
    ) -> T:
        with self._current_job.guard(function.__name__, group):
            return function(value, self.data_parallel_group if group is None else group, *options)

    def all_reduce(
        self, tensor: T, group: dist.ProcessGroup | None = None, reduce_op: collectives.Reduction = "mean"
    ) -> T:
        """Reduce a tensor or a number over the ranks; see `rankwise.process_group.all_reduce`."""
        return self._collective(collectives.all_reduce, tensor, group, reduce_op)  # type: ignore[no-any-return]

    def all_gather(
        self, tensor: Any, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> Any:
        """Gather a tensor from every rank, as `(world_size, *)`; see `rankwise.process_group.all_gather`.

        Numbers and arrays are gathered on this rank's device.
        """
        tensors = collectives.to_tensors(tensor, self.root_device)
        return self._collective(collectives.all_gather, tensors, group, sync_grads)

    def gather_all_tensors(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """Gather tensors of different sizes; see `rankwise.process_group.gather_all_tensors`."""
        return self._collective(collectives.gather_all_tensors, tensor, group)

    def all_gather_object(self, obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Gather anything picklable from every rank, in rank order."""
        return self._collective(objects.all_gather_object, obj, group)

    def gather_object(self, obj: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T] | None:
        """Gather anything picklable from the group (by default all ranks) on rank `dst`; None elsewhere."""
        with self._current_job.guard("gather_object", group):
            return objects.gather_object(obj, dst, self.job_group if group is None else group)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank of the job has called this; `name` is for error messages."""
        with self._current_job.guard(f"barrier {name!r}" if name else "barrier"):
            collectives.barrier(self.job_group)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s value on every rank of the job."""
        with self._current_job.guard("broadcast"):
            return objects.broadcast(obj, src, self.job_group)

    def call_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call `function`, without collectives, on global rank 0; return its value, or raise, everywhere."""
        value: Any = None
        with errors_shared(self, of_rank_zero=True):
            value = function() if self.is_global_zero else None
        return self.broadcast(value)  # type: ignore[no-any-return]  # what `function` has returned

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether all ranks (or, with `all=False`, any) of the job decided yes; the same on each."""
        counter = torch.tensor(int(decision), device=self.root_device)
        with self._current_job.guard("reduce_boolean_decision"):
            count = int(collectives.all_reduce(counter, self.job_group, "sum"))
        return count == self.world_size if all else count > 0

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return the block of `rankwise.process_group.rank_zero_first`: rank zero runs it first."""
        return rank_zero_first(local, ranks=self.ranks)


@contextmanager
def errors_shared(strategy: Any, *, of_rank_zero: bool = False) -> Iterator[None]:
    """Raise an exception of the block on every rank. Collective; the block must not call collectives.

    With `of_rank_zero`, only the block on global rank 0 can fail. Instead of another package's error, other
    ranks get a `WorkerRaisedError`.
    """
    own: Exception | None = None
    errors: list[Exception] = []
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised below, on all ranks
        own = error
    try:
        sent = own  # as every rank can read it:
        if own is not None and not isinstance(own, RankwiseError):
            sent = FailureRecord.of_exception(strategy.ranks, own).to_error(time.monotonic(), (), ())
        found = [strategy.broadcast(sent)] if of_rank_zero else strategy.all_gather_object(sent)
        errors = [error for error in found if error is not None]
        if errors:
            raise mark_propagated(errors[0]) if own is None else own
    finally:
        own, sent, found, errors = None, None, [], []  # their tracebacks refer to this frame


def write_checkpoint(strategy: Any, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint; see `Strategy.save_checkpoint`."""

    def write() -> None:
        with as_checkpoint_error(path):
            strategy.checkpoint_io.save_checkpoint(checkpoint, path)

    if is_after_failure():
        refuse_partly_updated("save_checkpoint()")
        with saving_in_hook_reported():
            write()
    elif (worker := _context_between_jobs(strategy)) is not None:
        with _awaited(strategy, worker, path):
            if strategy.is_global_zero:
                write()
    else:
        with errors_shared(strategy, of_rank_zero=True):
            if strategy.is_global_zero:
                report_phase("checkpoint")
                write()


def _context_between_jobs(strategy: Any) -> WorkerContext | None:
    """Return the context of a rank that continues after a job; None in a job, or without other ranks."""
    if not strategy.is_bound or strategy.is_in_job or collectives.is_distributed():
        return None
    launcher: Launcher | None = strategy.placement.launcher
    return None if launcher is None else launcher.context_between_jobs()


@contextmanager
def _awaited(strategy: Any, worker: WorkerContext, path: str | os.PathLike[str]) -> Iterator[None]:
    """Enter the block on rank 0, then on the other ranks; raise a failure of rank 0's on all."""
    try:
        store = worker.open_store(strategy.timeout)
        with awaited_between_jobs(store, worker.ranks.global_rank, strategy.timeout):
            yield
    except RankZeroFailedError as error:
        problem = f"could not be written by global_rank={error.global_rank}: {error.failure}"
        remedy = error.ADVICE.format(global_rank=0)
        raise CheckpointError(os.fspath(path), problem, remedy) from None
    except dist.DistError as error:
        if worker.ranks.global_rank == 0:
            return  # it has written the file; the others are gone with the store
        if isinstance(error, dist.DistNetworkError):
            warn(
                f"The program of global_rank=0 ended before this rank knew whether {os.fspath(path)!r} was "
                "written. If it was not, global_rank=0 shows why."
            )
            yield
            return
        timeout_s = strategy.timeout.total_seconds()
        raise RendezvousTimeoutError("global_rank=0 to save a checkpoint, too", timeout_s) from None

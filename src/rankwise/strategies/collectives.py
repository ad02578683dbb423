"""`Collectives`: the collectives of a strategy's ranks; with one process each is the identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.failures.classify import mark_propagated
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import blocked_in, report_phase
from rankwise.process_group import collectives, gathering
from rankwise.process_group.collective_check import CollectiveCheck
from rankwise.process_group.rank_zero import refuse_in_rank_zero_section
from rankwise.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@final
class Collectives:
    """Runs collectives, and reports to the supervisor that this rank waits in them.

    Every rank must call each of the methods, in the same order. `Strategy` documents those of the same name.

    Args:
        ranks: of this process.
        default_group: returns the group that is meant where none is given; None for all ranks.

    Attributes:
        check: compares each collective of the ranks before it runs; None unless `checked` is active.
    """

    def __init__(self, ranks: RankInfo, default_group: Callable[[], ProcessGroup | None]) -> None:
        self._ranks = ranks
        self._default_group = default_group
        self.check: CollectiveCheck | None = None

    def all_reduce(self, tensor: T, group: ProcessGroup | None, reduce_op: str) -> T:
        with self._guard("all_reduce", group):
            return collectives.all_reduce(tensor, self._group(group), reduce_op)

    def all_gather(self, tensor: T, group: ProcessGroup | None, sync_grads: bool) -> T:
        with self._guard("all_gather", group):
            return gathering.all_gather(tensor, self._group(group), sync_grads)

    def gather_all_tensors(self, tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
        with self._guard("gather_all_tensors", group):
            return gathering.gather_all_tensors(tensor, self._group(group))

    def all_gather_object(self, value: T, group: ProcessGroup | None) -> list[T]:
        with self._guard("all_gather_object", group):
            return gathering.all_gather_object(value, self._group(group))

    def gather_object(self, value: T, dst: int, group: ProcessGroup | None) -> list[T] | None:
        """Gather a value on rank `dst`; None elsewhere. Without a group, all ranks are meant."""
        with self._guard("gather_object", group):
            return gathering.gather_object(value, dst, group)

    def barrier(self, name: str | None) -> None:
        with self._guard(f"barrier {name!r}" if name else "barrier"):
            collectives.barrier()

    def broadcast(self, value: T, src: int) -> T:
        with self._guard("broadcast"):
            return collectives.broadcast(value, src)

    def count(self, decision: bool, device: torch.device) -> int:
        """Return on how many ranks of the job the decision is yes."""
        counter = torch.tensor(int(decision), device=device)
        with self._guard("reduce_boolean_decision"):
            return int(collectives.all_reduce(counter, reduce_op="sum"))

    def save_on_rank_zero(self, save: Callable[[], object]) -> None:
        """Run a function that saves something on global rank 0; all ranks continue after it, or all raise."""
        error: Exception | None = None
        if self._ranks.is_global_zero:
            try:
                report_phase("checkpoint")
                save()
            except Exception as raised:  # noqa: BLE001  raised below, on all ranks
                error = raised
        error = self.broadcast(error, src=0)
        if error is not None:
            raise error if self._ranks.is_global_zero else mark_propagated(error)

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

    def _group(self, group: ProcessGroup | None) -> ProcessGroup | None:
        return self._default_group() if group is None else group

    def _guard(self, name: str, group: ProcessGroup | None = None) -> AbstractContextManager[None]:
        """Return the block for a collective.

        Raises:
            LifecycleError: in code that only rank zero runs, where other ranks would never call it.
        """
        if self._ranks.world_size > 1:
            refuse_in_rank_zero_section(name, None if group is None else group.size())
        return blocked_in(name)

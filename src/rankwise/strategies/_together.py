"""`Together`: what all ranks of a strategy do at once; with one process each is the identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from rankwise.monitoring.heartbeat import blocked_in
from rankwise.process_group import collectives, gathering, rank_zero
from rankwise.process_group.rank_zero import refuse_in_rank_zero_section
from rankwise.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Together(ABC):
    """The collectives of a strategy. Every rank must call each of them, in the same order.

    Where `group` is None, `data_parallel_group` is meant; `torch.distributed.group.WORLD` is all ranks.
    """

    timeout = timedelta(minutes=10)
    """How long a collective may take."""

    @property
    @abstractmethod
    def ranks(self) -> RankInfo:
        """Who this process is."""

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """This process's device."""

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """The ranks that share out the data; None for all. Wrapping, reducing and sampling follow it."""
        return None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How samplers split the data: `num_replicas` and `rank`. Override to split it in another way."""
        group = self.data_parallel_group
        if group is None:
            return {"num_replicas": self.ranks.world_size, "rank": self.ranks.global_rank}
        return {"num_replicas": dist.get_world_size(group), "rank": dist.get_rank(group)}

    def all_reduce(self, tensor: T, group: ProcessGroup | None = None, reduce_op: str = "mean") -> T:
        """Reduce a tensor over the ranks; see `rankwise.process_group.all_reduce`."""
        with self._collective("all_reduce", group):
            return collectives.all_reduce(tensor, self._group(group), reduce_op)

    def all_gather(self, tensor: T, group: ProcessGroup | None = None, sync_grads: bool = False) -> T:
        """Gather a tensor from every rank, as `(world_size, *)`; see `rankwise.process_group.all_gather`."""
        with self._collective("all_gather", group):
            return gathering.all_gather(tensor, self._group(group), sync_grads)

    def gather_all_tensors(
        self, tensor: torch.Tensor, group: ProcessGroup | None = None
    ) -> list[torch.Tensor]:
        """Gather tensors of differing sizes; see `rankwise.process_group.gather_all_tensors`."""
        with self._collective("gather_all_tensors", group):
            return gathering.gather_all_tensors(tensor, self._group(group))

    def all_gather_object(self, obj: T, group: ProcessGroup | None = None) -> list[T]:
        """Gather anything picklable from every rank, in rank order."""
        with self._collective("all_gather_object", group):
            return gathering.all_gather_object(obj, self._group(group))

    def gather_object(self, obj: T, dst: int = 0, group: ProcessGroup | None = None) -> list[T] | None:
        """Gather anything picklable from every rank on rank `dst`, in rank order; None elsewhere."""
        with self._collective("gather_object", group):
            return gathering.gather_object(obj, dst, group)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank of the job is here; `name` is for the reader.

        Collective: every rank must call this, in the same order.
        """
        with self._collective(f"barrier {name!r}" if name else "barrier"):
            collectives.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s value on every rank of the job."""
        with self._collective("broadcast"):
            return collectives.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether all ranks (or, with `all=False`, any) of the job decided yes; the same on each.

        Collective: every rank must call this, in the same order.
        """
        counter = torch.tensor(int(decision), device=self.root_device)
        with self._collective("reduce_boolean_decision"):
            count = int(collectives.all_reduce(counter, reduce_op="sum"))
        return count == self.ranks.world_size if all else count > 0

    def before_finish(self) -> None:
        """Do what is to be done together once what was launched has returned here; nothing by default.

        Collective: where it does something, every rank must call this.
        """

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context whose block rank zero (with `local`, that of each node) runs before the others.

        See `rankwise.process_group.rank_zero_first`.
        """
        return rank_zero.rank_zero_first(local, ranks=self.ranks)

    def _collective(self, name: str, group: ProcessGroup | None = None) -> AbstractContextManager[None]:
        """Return a context for a collective: other processes see that this rank waits in it.

        Raises:
            LifecycleError: in what only rank zero runs, where the others would never come.
        """
        if self.ranks.world_size > 1:
            refuse_in_rank_zero_section(name, None if group is None else group.size())
        return blocked_in(name)

    def _group(self, group: ProcessGroup | None) -> ProcessGroup | None:
        return self.data_parallel_group if group is None else group

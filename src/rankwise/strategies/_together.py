"""`Together`: what all ranks of a strategy do at once; with one process each is the identity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import torch

from rankwise.process_group import collectives
from rankwise.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Together(ABC):
    """The collectives of a strategy. Every rank must call each of them, in the same order."""

    @property
    @abstractmethod
    def ranks(self) -> RankInfo:
        """Who this process is."""

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """This process's device."""

    def all_reduce(self, tensor: T, group: ProcessGroup | None = None, reduce_op: str = "mean") -> T:
        """Reduce a tensor over the ranks; see `rankwise.process_group.all_reduce`."""
        return collectives.all_reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather a tensor from every rank, as `(world_size, *)`; see `rankwise.process_group.all_gather`."""
        return collectives.all_gather(tensor, group, sync_grads)

    def all_gather_object(self, obj: T) -> list[T]:
        """Gather anything picklable from every rank, in rank order."""
        return collectives.all_gather_object(obj)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here; `name` is for the reader.

        Collective: every rank must call this, in the same order.
        """
        collectives.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s value on every rank."""
        return collectives.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Return whether all ranks (or, with `all=False`, any) decided yes; the same on every rank.

        Collective: every rank must call this, in the same order.
        """
        votes = torch.tensor(int(decision), device=self.root_device)
        count = int(collectives.all_reduce(votes, reduce_op_name="sum"))
        return count == self.ranks.world_size if all else count > 0

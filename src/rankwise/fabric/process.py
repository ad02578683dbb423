"""`FabricProcess`: what a Fabric knows of its process, and the collectives that it calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankwise.errors import LifecycleError
from rankwise.process_group.collectives import Reduction
from rankwise.strategies import AutoStrategy, DDPStrategy, Strategy

T = TypeVar("T")


class FabricProcess:
    """The ranks and the device of a Fabric's process, its collectives, and what needs a launch.

    Attributes:
        strategy: the strategy, bound.
    """

    strategy: Strategy

    @property
    def accelerator(self) -> str:
        """The kind of device: `"cpu"` or `"cuda"`."""
        return self.device.type

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.strategy.root_device

    @property
    def global_rank(self) -> int:
        """The number of this process in the job."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self.strategy.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self.strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process of the job."""
        return self.strategy.is_global_zero

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node only."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201  what the user asks for

    # Every rank must call each collective, in the same order. A group of None is `data_parallel_group`.

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this."""
        self._check_launched("barrier()")
        self.strategy.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s value on every rank."""
        self._check_launched("broadcast()")
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Gather tensors from every rank, as `(world_size, *)`; unchanged without a process group."""
        self._check_launched("all_gather()")
        return self.strategy.all_gather(data, group, sync_grads)

    def all_reduce(self, data: T, group: dist.ProcessGroup | None = None, reduce_op: Reduction = "mean") -> T:
        """Return tensors or numbers reduced over the ranks; the input does not change."""
        self._check_launched("all_reduce()")
        return self.strategy.all_reduce(data, group, reduce_op)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a block that rank zero (with `local`, that of each node) runs before the others."""
        self._check_launched("rank_zero_first()")
        return self.strategy.rank_zero_first(local)

    def _must_be_launched(self) -> bool:
        strategy = self.strategy
        is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(strategy, AutoStrategy)
        needs_others = strategy.world_size > 1 or is_ddp
        return needs_others and not strategy.is_in_job and not dist.is_initialized()

    def _check_launched(self, call: str) -> None:
        if self._must_be_launched():
            raise LifecycleError(
                call=f"Fabric.{call}",
                state="not launched",
                needed="the processes of the strategy",
                remedy="fabric.launch() before it, or fabric.launch(main) with the loop in main(fabric).",
            )

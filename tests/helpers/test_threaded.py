"""Ranks as threads: they leave the process as it was, also after a failure."""

import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.threaded import run_ranks


def test_forwards_that_overlap_leave_no_wrapper_active() -> None:
    """Rank 1's forward begins within rank 0's and ends after it: what it puts back is rank 0's."""
    began = [threading.Event(), threading.Event()]
    ended = threading.Event()

    class Overlapping(nn.Linear):
        def __init__(self, rank: int) -> None:
            super().__init__(2, 1)
            self.rank = rank

        def forward(self, x: Tensor) -> Tensor:
            began[self.rank].set()
            assert began[1].wait(60)
            assert self.rank == 0 or ended.wait(60)
            return super().forward(x)

    def forward(rank: int) -> None:
        wrapped = DistributedDataParallel(Overlapping(rank))
        assert rank == 0 or began[0].wait(60)
        with torch.no_grad():
            wrapped(torch.ones(1, 2))
        if rank == 0:
            ended.set()

    run_ranks(2, forward)
    assert getattr(DistributedDataParallel, "_active_ddp_module") is None  # noqa: B009 -- untyped


def total(rank: int) -> float:
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def interrupt() -> None:
    """Cut the main thread's wait, as a time limit does."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def fail() -> None:
    raise ValueError("no more")


@pytest.mark.parametrize(("act", "error"), [(interrupt, KeyboardInterrupt), (fail, ValueError)])
def test_ranks_that_wait_for_ever_end(act: Callable[[], None], error: type[BaseException]) -> None:
    """The first error, or what cuts the main thread's wait, ends all ranks; the next ones start anew."""

    def wait_in_vain(rank: int) -> None:
        act() if rank == 1 else dist.barrier()  # to which rank 1 never comes

    with pytest.raises(error, match="no more" if act is fail else None):
        run_ranks(3, wait_in_vain)
    assert run_ranks(3, total) == [6.0] * 3

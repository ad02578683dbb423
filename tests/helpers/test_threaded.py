"""Ranks as threads: they leave the process as it was."""

from __future__ import annotations

import threading

import torch
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

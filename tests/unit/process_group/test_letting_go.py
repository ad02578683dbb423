"""Process groups are let go of: at once where nobody else has one, a moment later where somebody does."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from rankwise.process_group.group import process_group
from rankwise.ranks import RankInfo


def job(work: Callable[[], object]) -> list[weakref.ref[dist.ProcessGroup]]:
    """Call `work` while there are the default group and another one; return weak references to both."""
    ranks = RankInfo(0, 0, 0, 1, 1, 1)
    with process_group(dist.HashStore(), ranks, "gloo", torch.device("cpu"), timeout=timedelta(seconds=60)):
        dist.new_group([0])
        work()
        return [weakref.ref(group) for group in groups()]


def groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def test_at_once() -> None:
    """Nobody has them when they are destroyed: their threads and sockets are gone with the job."""
    assert [left() for left in job(groups)] == [None, None]


def test_a_moment_after_everybody_else() -> None:
    """Somebody has them: they stay for a moment longer, as whose thread lets go of them is not known."""
    kept: list[dist.ProcessGroup] = []
    left = job(lambda: kept.extend(groups()))
    kept.clear()
    assert len(left) == 2
    assert all(group() is not None for group in left)
    deadline_s = time.monotonic() + 60
    while any(group() is not None for group in left) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [group() for group in left] == [None, None]

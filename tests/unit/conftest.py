"""Ranks without processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rankwise.monitoring.heartbeat import HeartbeatReader, MonitoredRank
from rankwise.processes.shared_memory import create_memory_file
from rankwise.ranks import RankInfo


@pytest.fixture
def workers() -> Iterator[list[MonitoredRank]]:
    """Return two ranks that have nothing but a heartbeat, which nobody writes."""
    descriptors = [create_memory_file() for _ in range(2)]
    ranks = [RankInfo(rank, rank, 0, 2, 2, 1) for rank in range(2)]
    yield [
        MonitoredRank(each, None, HeartbeatReader(descriptor))
        for each, descriptor in zip(ranks, descriptors, strict=True)
    ]
    for descriptor in descriptors:
        os.close(descriptor)

"""Ranks without processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from rankwise.launchers.worker_state import WorkerState
from rankwise.monitoring.heartbeat import HeartbeatReader
from rankwise.processes.shared_memory import create_memory_file
from rankwise.ranks import RankInfo


@pytest.fixture
def workers() -> Iterator[list[WorkerState]]:
    """Return two ranks that have nothing but a heartbeat, which nobody writes."""
    sockets, descriptors = socket.socketpair(), [create_memory_file() for _ in range(2)]
    ranks = [RankInfo(rank, rank, 0, 2, 2, 1) for rank in range(2)]
    yield [
        WorkerState(each, sock, None, HeartbeatReader(descriptor))
        for each, sock, descriptor in zip(ranks, sockets, descriptors, strict=True)
    ]
    for sock, descriptor in zip(sockets, descriptors, strict=True):
        sock.close()
        os.close(descriptor)

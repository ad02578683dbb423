"""Ranks without processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from rankwise.launchers._member import Member
from rankwise.launchers._memory_file import create_memory_file
from rankwise.process_group.pulse import PulseReader
from rankwise.ranks import RankInfo


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Return two ranks that have nothing but a pulse, which nobody writes."""
    sockets, descriptors = socket.socketpair(), [create_memory_file() for _ in range(2)]
    ranks = [RankInfo(rank, rank, 0, 2, 2, 1) for rank in range(2)]
    yield [
        Member(each, sock, None, PulseReader(descriptor))
        for each, sock, descriptor in zip(ranks, sockets, descriptors, strict=True)
    ]
    for sock, descriptor in zip(sockets, descriptors, strict=True):
        sock.close()
        os.close(descriptor)

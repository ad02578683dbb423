"""The comparison of a new group's ranks ends for all of them together."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from rankwise.errors import PeerAuthenticationError, RendezvousTimeoutError
from rankwise.process_group.authentication import _Exchange, _JobSettings


def exchanges(size: int) -> list[_Exchange]:
    """Return what the ranks of a group compare by, before any of them has compared."""
    store, settings = dist.HashStore(), _JobSettings(b"key", timedelta(seconds=0.2))
    return [_Exchange(store, "name", rank, size, settings) for rank in range(size)]


def test_a_rank_waits_for_what_the_last_one_finds() -> None:
    """No rank uses the group before all have compared: an impostor that the last finds is an error of all."""
    first, last = exchanges(2)
    with pytest.raises(RendezvousTimeoutError):
        first.finish()
    with pytest.raises(PeerAuthenticationError, match="in place of rank 0"):
        last._raise("another process in place of rank 0")
    with pytest.raises(PeerAuthenticationError, match="in place of rank 0"):
        first.finish()


def test_a_rank_that_is_alone() -> None:
    """A rank that waits for another one names what it waits for, after its own time limit."""
    first, _ = exchanges(2)
    with pytest.raises(RendezvousTimeoutError, match="the other ranks of a new process group"):
        first.meet(timedelta(seconds=0.2))

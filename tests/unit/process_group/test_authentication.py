"""The comparison of a new group's ranks ends for all of them together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from rankwise.errors import PeerAuthenticationError, RendezvousTimeoutError
from rankwise.process_group.authentication import _Exchange, _Gloo, _JobSettings
from tests.helpers.raising import raises

LIMIT = timedelta(seconds=5)


def exchanges(size: int, timeout: timedelta = timedelta(seconds=0.2)) -> list[_Exchange]:
    """Return what the ranks of a group compare by, before any of them has compared."""
    store, settings = dist.HashStore(), _JobSettings(b"key", timeout)
    return [_Exchange(store, "name", rank, size, settings) for rank in range(size)]


def connected() -> tuple[list[_Exchange], list[Any]]:
    """Return what two ranks compare by, and their connected groups."""
    both, store = exchanges(2, LIMIT), dist.HashStore()

    def connect(exchange: _Exchange) -> Any:
        exchange.meet(LIMIT)
        options = _Gloo._Options()
        options._devices, options._timeout = [_Gloo.create_device(interface="lo")], LIMIT
        return exchange.connect(store, options)

    with ThreadPoolExecutor(2) as threads:
        return both, list(threads.map(connect, both))


def test_a_rank_waits_for_what_the_last_one_finds() -> None:
    """No rank uses the group before all have compared: an impostor that the last finds is an error of all."""
    alone, _ = exchanges(2)
    raises(RendezvousTimeoutError, "ranks of a new process group", alone.meet, timedelta(seconds=0.2))
    first, last = exchanges(2)
    raises(RendezvousTimeoutError, None, first.finish)
    raises(PeerAuthenticationError, "in place of rank 0", last._raise, "another process in place of rank 0")
    raises(PeerAuthenticationError, "in place of rank 0", first.finish)


def test_a_rank_that_does_not_compare() -> None:
    """The other one waits no longer than it may."""
    (first, _), groups = connected()
    first._deadline = 0.0
    raises(RendezvousTimeoutError, "one of them hangs", first.compare, groups[0])


class EndsLate:
    """A group whose exchange ends just after a wait for it has run out of time."""

    def __init__(self, group: Any, begin: Callable[[], None]) -> None:
        self.options, self._group, self._begin = group.options, group, begin

    def alltoall_base(self, *arguments: Any) -> Any:
        self._work = self._group.alltoall_base(*arguments)
        self.is_completed = self._work.is_completed
        return self

    def wait(self, *limit: timedelta) -> Any:
        try:
            return self._work.wait(*limit)
        except RuntimeError:
            self._begin()
            while not self.is_completed():
                pass
            raise


def test_an_exchange_that_ends_just_after_a_wait() -> None:
    """It has ended well."""
    (first, last), groups = connected()
    first.compare(EndsLate(groups[0], partial(last.compare, groups[1])))


def test_a_rank_that_has_left_the_group() -> None:
    """What it has found is the error, not that its connection is closed."""
    (first, last), groups = connected()
    raises(PeerAuthenticationError, "rank 0", last._raise, "another process in place of rank 0")
    del groups[1]
    raises(PeerAuthenticationError, "in place of rank 0", first.compare, groups[0])

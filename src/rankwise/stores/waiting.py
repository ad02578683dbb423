"""Wait through a store for other ranks: for keys that they set, and for votes that they cast."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, final

import torch.distributed as dist

from rankwise.errors import PeerAuthenticationError, RankwiseError
from rankwise.stores.private import is_private
from rankwise.stores.sealed import SealedStore
from rankwise.stores.tcp import default_store
from rankwise.stores.values import read_value
from rankwise.time_limit import call_with_limit

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_FOR = 1 << 32  # votes for count in the upper half, all votes in the lower
OUT_OF_REACH = (RuntimeError, ValueError, KeyError, RankwiseError)  # of a store that is gone, or never was
T = TypeVar("T")


def poll_until(is_done: Callable[[], bool], timeout: timedelta) -> bool:
    """Call `is_done` until it returns True, with growing pauses; return False after `timeout`.

    `TCPStore.wait` blocks in C++, where Python runs no signal handler, and writes a warning to stderr when it
    times out. Its `check` returns at once, so signals are handled meanwhile.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def wait_for_keys(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> bool:
    """Return whether all keys are set within `timeout`; raise when the job is stopped meanwhile."""
    if not is_private(store):
        return poll_until(lambda: store.check(list(keys)), timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        store.wait(list(keys), timeout)
    except dist.DistStoreError:
        if time.monotonic() < deadline:
            raise
        return False
    return True


def call_store(request: Callable[[], T], limit_s: float) -> list[T]:
    """Return the value of a request to a store, or nothing after `limit_s`: it may block without end."""
    return call_with_limit(request, limit_s, *OUT_OF_REACH, name="rankwise-store-request")


@final
class StoreCounter:
    """Count in a store how many ranks of a group (None: all) vote for something, again and again.

    Collective: every rank must make one, and then hold the same votes.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self._store = default_store()
        self._timeout = timeout
        scope = f"votes/{self._ranks[0]}"
        series = self._store.add(f"{scope}/series of {dist.get_rank()}", 1)  # the same number on every rank
        self._prefix = f"{scope}/{series}"

    def count(self, number: int, *, is_for: bool) -> int:
        """Vote, and return how many ranks voted for it.

        Collective: every rank must call this.
        """
        votes, result = self._keys(number)
        if isinstance(self._store, SealedStore):  # a stranger can change what `add` counts
            self._store.set(self._vote_key(number, dist.get_rank()), json.dumps([number, is_for]))
        total = self._store.add(votes, 1 + (_FOR if is_for else 0))
        if total % _FOR == len(self._ranks):
            votes_for = self._read_votes(number) if isinstance(self._store, SealedStore) else total // _FOR
            self._store.set(result, str(votes_for))
            for key in self._keys(number - 2):  # all ranks have voted since, and so have read that result
                self._store.delete_key(key)
        self._store.wait([result], self._timeout)
        return read_value(self._store, result, int)

    def _read_votes(self, number: int) -> int:
        keys = [self._vote_key(number, rank) for rank in self._ranks]
        votes = [read_value(self._store, key, tuple[int, bool]) for key in keys]
        if {of for of, _ in votes} != {number}:
            raise PeerAuthenticationError("The votes of ranks in the job's store are earlier ones.")
        return sum(is_for for _, is_for in votes)

    def _vote_key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/vote {number % 2}/{rank}"  # a rank that votes has read the result before

    def _keys(self, number: int) -> tuple[str, str]:
        return f"{self._prefix}/{number}/votes", f"{self._prefix}/{number}/result"

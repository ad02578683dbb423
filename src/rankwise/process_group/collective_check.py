"""Compare each collective of the ranks at the store before it runs: a mismatch is an error on all of them."""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankwise.errors import CollectiveMismatchError
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.process_group.interception import Call, call_from_here, intercepted
from rankwise.process_group.rank_zero import refuse_in_rank_zero_section

__all__ = ["CollectiveCheck"]

# A vote is a fingerprint in the lower part of a number that all ranks add to, and a one in the upper part.
_ONE = 1 << 48
_END = "the end of what was launched"
_LONG = timedelta(days=7)  # after its last collective a rank may have much to do
_PATIENCE = timedelta(seconds=10)  # until all ranks of a mismatch have said what they called
_NOTHING_YET = "no collective yet"


@final
@dataclass(frozen=True)
class _Meeting:
    """A collective that the members of a group have to come to: its `number` among those of the group."""

    group: str
    workers: tuple[int, ...]
    number: int

    @property
    def key(self) -> str:
        return f"{self.group}/{self.number}"

    @property
    def all_keys(self) -> list[str]:
        return [f"{self.key}/{name}" for name in ("counter", "differ", "met")]


@final
class CollectiveCheck:
    """One rank's part in comparing collectives.

    A collective costs one vote, and one wait for the other ranks' votes. What each rank called is exchanged
    only where the votes are not the same.

    Args:
        global_rank: who this process is.
        store: the job's; threads wait in it.
        timeout: how long to wait for the other ranks.
    """

    def __init__(self, global_rank: int, store: dist.Store, timeout: timedelta) -> None:
        self._rank = global_rank
        self._store = dist.PrefixStore("collectives", store)
        self._timeout = timeout
        self._numbers: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Compare what this process calls in the block.

        Raises, out of the collectives called in it:
            CollectiveMismatchError: on every rank of the group, when they differ or some do not come.
            LifecycleError: in a section that only one rank runs.
        """
        with intercepted(self._before):
            yield

    def finish(self) -> None:
        """Compare that all ranks are done: a rank that is comes to no further collective of any group.

        Collective: every rank must call this.

        Raises:
            CollectiveMismatchError: when others are in a collective.
        """
        world = dist.group.WORLD
        for group in list(distributed_c10d._world.pg_names):  # torch has no public list of them
            if group is not world and group.size() > 1:
                endpoint = self._next(group)
                self._store.set(f"{endpoint.key}/call/{self._rank}", _END)
                self._vote(endpoint, _END)
        if world is not None:
            with blocked_in(_END):
                self._meet(self._next(world), _END, _END, _LONG)

    def compare(self, group: dist.ProcessGroup, name: str) -> None:
        """Compare a call of this process in which C++ runs collectives that nobody else sees.

        Raises:
            The same errors as collectives in `checking`.
        """
        self._before(call_from_here(group, name))

    def _before(self, call: Call) -> None:
        text = f"{call.what} {call.where}"
        refuse_in_rank_zero_section(text, call.group.size())
        with blocked_in(f"{call.name} {call.where}"):
            self._meet(self._next(call.group), text, call.identity, self._timeout)

    def _next(self, group: dist.ProcessGroup) -> _Meeting:
        name = group.group_name
        with self._lock:
            self._numbers[name] += 1
            number = self._numbers[name]
        return _Meeting(name, tuple(dist.get_process_group_ranks(group)), number)

    def _meet(self, endpoint: _Meeting, call: str, identity: str, timeout: timedelta) -> None:
        """Wait until all members have come to the same call, or raise."""
        self._store.set(f"last/{self._rank}", f"{endpoint.key} {call}")
        if not self._vote(endpoint, identity):
            try:
                self._store.wait([f"{endpoint.key}/met"], timeout)
            except dist.DistStoreError:
                raise self._late(endpoint, timeout) from None
        if self._store.check([f"{endpoint.key}/differ"]):
            raise self._mismatch(endpoint, call)

    def _vote(self, endpoint: _Meeting, identity: str) -> bool:
        """Say what this rank calls, and return whether it is the last; that one says how it came out."""
        fingerprint = zlib.crc32(identity.encode())
        size = len(endpoint.workers)
        count, total = divmod(self._store.add(f"{endpoint.key}/votes", _ONE + fingerprint), _ONE)
        if count < size:
            return False
        if total != size * fingerprint:
            self._store.set(f"{endpoint.key}/differ", "1")
        self._store.set(f"{endpoint.key}/met", "1")
        for key in _Meeting(endpoint.group, (), endpoint.number - 1).all_keys:
            self._store.delete_key(key)  # all have left that one
        return True

    # ------------------------------------------------------------------ errors

    def _mismatch(self, endpoint: _Meeting, call: str) -> CollectiveMismatchError:
        self._store.set(f"{endpoint.key}/call/{self._rank}", call)
        calls: dict[int, str] = {}
        for rank in endpoint.workers:
            key = f"{endpoint.key}/call/{rank}"
            try:
                self._store.wait([key], _PATIENCE)
                calls[rank] = self._store.get(key).decode()
            except dist.DistStoreError:
                calls[rank] = "another call"  # it has ended since
        return CollectiveMismatchError(
            group=_described(endpoint), number=endpoint.number, calls=_by_call(calls)
        )

    def _late(self, endpoint: _Meeting, timeout: timedelta) -> CollectiveMismatchError:
        here: dict[int, str] = {}
        elsewhere: dict[int, str] = {}
        for rank in endpoint.workers:
            key, _, call = self._last_call(rank).partition(" ")
            (here if key == endpoint.key else elsewhere)[rank] = call
        return CollectiveMismatchError(
            group=_described(endpoint),
            number=endpoint.number,
            calls=_by_call(here),
            missing=_by_call(elsewhere),
            timeout_s=timeout.total_seconds(),
        )

    def _last_call(self, rank: int) -> str:
        key = f"last/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else f"none {_NOTHING_YET}"


def _described(endpoint: _Meeting) -> str:
    if len(endpoint.workers) == dist.get_world_size():
        return "all ranks"
    return f"global_rank {', '.join(map(str, endpoint.workers))}"


def _by_call(calls: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    return {
        call: tuple(rank for rank, called in calls.items() if called == call)
        for call in dict.fromkeys(calls.values())
    }

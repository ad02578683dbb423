"""Compare each collective over the store before it runs; a mismatch is an error on every rank."""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from datetime import timedelta
from typing import NamedTuple, final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankwise.errors import CollectiveMismatchError
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.process_group.interception import Call
from rankwise.process_group.lone_calls import refuse_lone_call
from rankwise.process_group.rank_comparison import ranks_by_value
from rankwise.stores.sealed import part_of

# All ranks add to one number: its upper part counts them, its lower part sums fingerprints of their calls.
_COUNT_UNIT = 1 << 48
_END = "the end of what was launched"
_END_TIMEOUT = timedelta(days=7)  # a rank may work for long after its last collective
_CALLS_TIMEOUT = timedelta(seconds=10)  # until all ranks of a mismatch have published their calls


@final
class _Slot(NamedTuple):
    """The position of a collective: its `number` in the sequence of a group, and the group's global ranks."""

    group: str
    ranks: tuple[int, ...]
    number: int

    @property
    def key(self) -> str:
        return f"{self.group}/{self.number}"

    def __str__(self) -> str:
        if len(self.ranks) == dist.get_world_size():
            return "all ranks"
        return f"global_rank {', '.join(map(str, self.ranks))}"


@final
class CollectiveCheck:
    """Compares this rank's collectives with the other ranks'.

    A collective costs one addition in the store and one wait for the other ranks' additions. The ranks
    exchange the texts of their calls only after a mismatch. Threads wait in `store`.
    """

    def __init__(self, global_rank: int, store: dist.Store, timeout: timedelta) -> None:
        self._rank = global_rank
        self._store = part_of(store, "collectives")
        self._timeout = timeout
        self._numbers: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def finish(self) -> None:
        """Check that all ranks are done, so that no rank waits for another one in a collective.

        Collective: every rank must call this.
        """
        world = dist.group.WORLD
        for group in list(distributed_c10d._world.pg_names):  # torch has no public list of groups
            if group is not world and group.size() > 1:
                slot = self._next_slot(group)
                self._store.set(f"{slot.key}/call/{self._rank}", _END)
                self._add_call(slot, _END)
        if world is not None:
            with blocked_in(_END):
                self._wait_for_same_call(self._next_slot(world), _END, _END, _END_TIMEOUT)

    def compare(self, call: Call) -> None:
        """Compare this rank's call with the other ranks'; raise where they differ or one is missing."""
        text = f"{call.what} {call.where}"
        refuse_lone_call(text, call.group.size())
        with blocked_in(f"{call.name} {call.where}"):
            self._wait_for_same_call(self._next_slot(call.group), text, call.identity, self._timeout)

    def _next_slot(self, group: dist.ProcessGroup) -> _Slot:
        name = group.group_name
        with self._lock:
            self._numbers[name] += 1
            number = self._numbers[name]
        return _Slot(name, tuple(dist.get_process_group_ranks(group)), number)

    def _wait_for_same_call(self, slot: _Slot, call: str, identity: str, timeout: timedelta) -> None:
        """Wait until all ranks of the group have made the same call, or raise."""
        self._store.set(f"last/{self._rank}", f"{slot.key} {call}")
        if not self._add_call(slot, identity):
            try:
                self._store.wait([f"{slot.key}/complete"], timeout)
            except dist.DistStoreError:
                raise self._missing_error(slot, timeout) from None
        if self._store.check([f"{slot.key}/differ"]):
            raise self._mismatch_error(slot, call)

    def _add_call(self, slot: _Slot, identity: str) -> bool:
        """Add this rank's call; return whether it was the last one, which then publishes the result."""
        fingerprint = zlib.crc32(identity.encode())
        size = len(slot.ranks)
        count, total = divmod(self._store.add(f"{slot.key}/calls", _COUNT_UNIT + fingerprint), _COUNT_UNIT)
        if count < size:
            return False
        if total != size * fingerprint:
            self._store.set(f"{slot.key}/differ", "1")
        self._store.set(f"{slot.key}/complete", "1")
        for name in ("calls", "differ", "complete"):  # every rank is past the previous collective
            self._store.delete_key(f"{slot.group}/{slot.number - 1}/{name}")
        return True

    def _mismatch_error(self, slot: _Slot, call: str) -> CollectiveMismatchError:
        self._store.set(f"{slot.key}/call/{self._rank}", call)
        calls: dict[int, str] = {}
        for rank in slot.ranks:
            key = f"{slot.key}/call/{rank}"
            try:
                self._store.wait([key], _CALLS_TIMEOUT)
                calls[rank] = self._store.get(key).decode(errors="replace")
            except dist.DistStoreError:
                calls[rank] = "another call"  # that rank has ended
        return CollectiveMismatchError(group=str(slot), number=slot.number, calls=ranks_by_value(calls))

    def _missing_error(self, slot: _Slot, timeout: timedelta) -> CollectiveMismatchError:
        here, elsewhere = dict[int, str](), dict[int, str]()
        for rank in slot.ranks:
            last = "none no collective yet"
            if self._store.check([f"last/{rank}"]):
                last = self._store.get(f"last/{rank}").decode(errors="replace")
            key, _, call = last.partition(" ")
            (here if key == slot.key else elsewhere)[rank] = call
        calls, missing = ranks_by_value(here), ranks_by_value(elsewhere)
        return CollectiveMismatchError(str(slot), slot.number, calls, missing, timeout.total_seconds())

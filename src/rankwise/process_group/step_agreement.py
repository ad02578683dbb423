"""Agree at a boundary between steps, without a collective: when all stop, and that all have made a change.

A rank that needs an agreement sends a message to all ranks. The monitor of every rank answers for the step
that its main thread is in; where that has not come so far, the main thread answers when it does. Without a
request, a step sets a number and reads one flag.

The main thread sets the number of the step that it begins, and then looks for a request. The monitor's thread
notes a request, and then looks at the number. So either the monitor answers for this step, or this step waits
for the agreement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import final
from weakref import WeakMethod

import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RankMismatchError, StopAgreementError
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.monitoring.rank_monitor import RankMonitor, send_message
from rankwise.process_group.collectives import ranks_of
from rankwise.process_group.rank_comparison import differences
from rankwise.ranks import RankInfo
from rankwise.stores.tcp import default_store
from rankwise.stores.values import decoded, read_value
from rankwise.stores.waiting import call_store, wait_for_keys

_KIND, _REASON = "stop", "stop/reason"
_COLLECTOR, _LIMIT = "stop/collector", "stop/limit"
_PARTS = 1 << 24  # how many a step has at most
# The answer of a rank whose loop has ended by itself: no rank stops before the end of its own loop then.
_ENDED = 1 << 60
_CLOSE_S = 1.0
_SINCE = "the step of the last change"


@final
@dataclass(eq=False)
class StopAgreement:
    """One rank's part in stopping together: one per job. `begin_step` is the boundary between steps.

    A step may have parts, and their number may differ between ranks. `begin_part` is a boundary as well, and
    so is `end_parts`, after a rank's last part; from there on the whole step counts as begun.

    The first rank that asked, the collector, reads all answers; the highest is the last step of all ranks.
    So the requests of any other rank do not grow with the world. `begin_step`, `begin_part`, `end_parts` and
    `finish` raise `StopAgreementError` if a rank does not answer in time.
    """

    ranks: RankInfo
    monitor: RankMonitor | None  # None where this is the only rank
    timeout: timedelta  # how long to wait for other ranks' answers
    reason: str | None = field(default=None, init=False)  # why all ranks stop, once they do; the same on all
    _begun: int = field(default=0, init=False)  # _PARTS for each step, and one more for each of its parts
    _own_reason: str | None = field(default=None, init=False)
    _is_pending: bool = field(default=False, init=False)  # a rank, this one or another, requests to stop
    _limit: int | None = field(default=None, init=False)  # what the ranks have agreed on
    _is_collector: bool = field(default=False, init=False)

    def start(self) -> None:
        """Answer the requests of other ranks from here on."""
        if self.monitor is not None:
            self.monitor.subscribe(_KIND, self._on_request)

    def close(self) -> None:
        """Answer later requests after the loop has failed, so that no rank waits for this one.

        The answer is given up if the store does not reply.
        """
        self._begun = _ENDED
        if self.monitor is not None and self._limit is None:
            call_store(partial(self._on_request, ""), _CLOSE_S)

    def request(self, reason: str) -> None:
        """Request that all ranks stop; the request acts at this rank's next boundary.

        Runs on: any thread, and signal handlers, as it only sets flags.
        """
        if self._own_reason is None:
            self._own_reason = reason
        self._is_pending = True

    def begin_step(self) -> bool:
        """Return whether the next step may begin; False on all ranks after the same step, or part of it."""
        return self._begin((self._begun // _PARTS + 1) * _PARTS)

    def begin_part(self) -> bool:
        """As `begin_step`, for the next part of the step."""
        return self._begin(self._begun + 1)

    def end_parts(self) -> bool:
        """As `begin_step`, for what comes after the step's last part."""
        return self._begin(self._begun // _PARTS * _PARTS + _PARTS - 1)

    def finish(self) -> bool:
        """End this rank's part, as its loop has ended; return whether all ranks have stopped there."""
        self._begun = _ENDED
        if self.monitor is None:
            return False
        with blocked_in("end of training"):
            return self._agreed_limit(self.monitor) != _ENDED

    def _begin(self, number: int) -> bool:
        # A rank that has a request answers with the step before: a step after which all request is the last.
        if self._is_pending and number > self._wait_for_limit():
            return False
        before, self._begun = self._begun, number  # before the flag is read: see above
        if self._is_pending and number > self._wait_for_limit():
            self._begun = before
            return False
        return True

    def _on_request(self, _: str) -> None:
        """Answer. Runs on: the monitor's thread, or one of `close`."""
        self._is_pending = True
        if self.monitor is not None:
            self.monitor.set_once(_answer_key(self.ranks.global_rank), str(self._begun))

    def _wait_for_limit(self) -> int:
        """Return the step after which all ranks stop; wait until all have answered."""
        if self.monitor is None:
            self.reason = self._own_reason
            return self._begun
        if self._own_reason is not None and self._limit is None:
            store, own = self.monitor.store, str(self.ranks.global_rank)
            store.compare_set(_REASON, "", self._own_reason)  # the first reason counts
            if store.compare_set(_COLLECTOR, "", own) == own.encode():  # no other rank has sent a request
                self._is_collector = True
                send_message(store, range(self.ranks.world_size), _KIND)
        return self._agreed_limit(self.monitor)

    def _agreed_limit(self, monitor: RankMonitor) -> int:
        store = monitor.store
        if self._limit is None:
            own = store.compare_set(_answer_key(self.ranks.global_rank), "", str(self._begun))
            if self._is_collector:
                keys = [_answer_key(rank) for rank in range(self.ranks.world_size)]
                self._wait(store, keys)
                self._limit = max(read_value(store, key, int) for key in keys)
                store.set(_LIMIT, str(self._limit))
            elif own == b"%d" % _ENDED:
                self._limit = _ENDED
            else:
                self._wait(store, [_LIMIT])
                self._limit = read_value(store, _LIMIT, int)
            if self._limit != _ENDED:
                self.reason = store.get(_REASON).decode(errors="replace")
        return self._limit

    def _wait(self, store: dist.Store, keys: Sequence[str]) -> None:
        if not wait_for_keys(store, keys, self.timeout):
            everyone = range(self.ranks.world_size)
            missing = tuple(rank for rank in everyone if not store.check([_answer_key(rank)]))
            missing = missing or (read_value(store, _COLLECTOR, int),)
            raise StopAgreementError(missing=missing, timeout_s=self.timeout.total_seconds())


def _answer_key(rank: int) -> str:
    return f"stop/answer{rank}"


@final
@dataclass(eq=False)
class ChangeAgreement:
    """One rank's part in changing something together with the ranks of a group.

    A rank that has changed something must not run a collective with ranks that have not: collectives of
    different sizes abort a process, and collectives of the same size mix different data. So before its next
    step it asks all ranks for their facts.

    Collective: every rank must create it, and call `begin_step` equally often. Without a monitor, a rank that
    has changed something alone notices it when its wait for the others times out.
    """

    facts: Callable[[], Mapping[str, str]]  # this rank's, as of its last change; called in any thread
    group: dist.ProcessGroup | None  # the ranks that change together; None for all
    timeout: timedelta  # how long to wait for the others' answers
    monitor: RankMonitor | None = None
    _begun: int = field(default=0, init=False)
    _changed: int = field(default=0, init=False)  # the step of the last change
    _requested: int = field(default=0, init=False)  # the last step for which a rank wants answers

    def __post_init__(self) -> None:
        self._ranks = ranks_of(self.group)
        self._rank = dist.get_rank()
        self._store = default_store() if self.monitor is None else self.monitor.store
        scope = f"changes/{blake2b(repr(self._ranks).encode(), digest_size=8).hexdigest()}"
        series = self._store.add(f"{scope}/series of {self._rank}", 1)  # the same number on every rank
        self._name = f"{scope}/{series}"
        if self.monitor is not None:
            _subscribe_weakly(self.monitor, self._name, self._on_request)

    def begin_step(self, has_changed: bool) -> None:
        """Begin the next step; raise `RankMismatchError` if a rank has changed facts, and others differ."""
        number = self._begun + 1
        if has_changed:
            self._changed = number
        self._begun = number  # before the flag is read: see above
        if has_changed or self._requested == number:
            self._agree(number)

    def _on_request(self, text: str) -> None:
        """Answer for a step that has begun. Runs on: the monitor's thread."""
        with suppress(ProcessGroupError):  # no rank has sent it
            self._requested = decoded(int, text, f"a request of {self._name}")
        number = self._requested
        if self._begun >= number and self.monitor is not None:
            self.monitor.set_once(self._key(number, self._rank), self._answer())

    def _agree(self, number: int) -> None:
        store = self._store
        store.compare_set(self._key(number, self._rank), "", self._answer())
        if self.monitor is not None:
            others = [rank for rank in self._ranks if rank != self._rank]
            send_message(store, others, self._name, str(number))
        keys = [self._key(number, rank) for rank in self._ranks]
        with blocked_in("agreement on changed parameters"):
            has_all = wait_for_keys(store, keys, self.timeout)
        answers = {
            rank: store.get(key) if has_all or store.check([key]) else None
            for rank, key in zip(self._ranks, keys, strict=True)
        }
        if len(set(answers.values())) > 1:
            raise RankMismatchError(self._differences(answers))

    def _differences(self, answers: dict[int, bytes | None]) -> dict[str, dict[str, tuple[int, ...]]]:
        facts = {
            rank: {_SINCE: "no answer"} if each is None else decoded(dict[str, str], each, self._name)
            for rank, each in answers.items()
        }
        if None in answers.values():
            facts = {rank: {_SINCE: own.get(_SINCE, "")} for rank, own in facts.items()}
        found = differences(facts)
        if len(found) > 1:
            found.pop(_SINCE, None)  # differs as a consequence
        return found

    def _answer(self) -> str:
        return json.dumps({**self.facts(), _SINCE: str(self._changed)})

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"


def _subscribe_weakly(monitor: RankMonitor, kind: str, on_message: Callable[[str], None]) -> None:
    """Subscribe a method while its object exists: the monitor lives longer than a module and its facts."""
    method = WeakMethod(on_message, lambda _: monitor.unsubscribe(kind))

    def receive(text: str) -> None:
        if (found := method()) is not None:
            found(text)

    monitor.subscribe(kind, receive)

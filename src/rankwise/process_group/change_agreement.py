"""Agree that all ranks have changed something before the same step, without a collective.

A rank that has changed something must not run a collective with ranks that have not: collectives of different
sizes abort a process, and collectives of the same size mix different data. So before its next step it sends a
message to all ranks, and each answers with its facts: the monitor's thread if the main thread is already in
that step, else the main thread when it gets there. Without a change, a step adds to a number and reads a
flag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import final
from weakref import WeakMethod

import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RankMismatchError
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.monitoring.rank_monitor import RankMonitor, send_message
from rankwise.process_group.rank_facts import differences
from rankwise.stores.tcp import default_store
from rankwise.stores.values import decoded
from rankwise.stores.waiting import wait_for_keys

_SINCE = "the step of the last change"


@final
@dataclass(eq=False)
class ChangeAgreement:
    """One rank's part in changing something together with the ranks of a group.

    Collective: every rank must create it, and call `begin_step` equally often.

    Attributes:
        facts: returns this rank's facts by name, as of its last change; called in any thread.
        group: the ranks that change together; None for all.
        timeout: how long to wait for the others' answers.
        monitor: this rank's monitor in the same job. Without one, a rank that has changed something alone
            notices it when its wait for the others times out.
    """

    facts: Callable[[], Mapping[str, str]]
    group: dist.ProcessGroup | None
    timeout: timedelta
    monitor: RankMonitor | None = None
    _begun: int = field(default=0, init=False)
    _changed: int = field(default=0, init=False)  # the step of the last change
    _requested: int = field(default=0, init=False)  # the last step for which a rank wants answers

    def __post_init__(self) -> None:
        world: dist.ProcessGroup | None = dist.group.WORLD
        self._ranks = dist.get_process_group_ranks(world if self.group is None else self.group)
        self._rank = dist.get_rank()
        self._store = default_store() if self.monitor is None else self.monitor.store
        scope = f"changes/{blake2b(repr(self._ranks).encode(), digest_size=8).hexdigest()}"
        series = self._store.add(f"{scope}/series of {self._rank}", 1)  # the same number on every rank
        self._name = f"{scope}/{series}"
        if self.monitor is not None:
            # The monitor lives longer than a module and its facts.
            on_end = partial(_unsubscribe, self.monitor, self._name)
            self.monitor.subscribe(self._name, partial(_call, WeakMethod(self._on_request, on_end)))

    def begin_step(self, has_changed: bool) -> None:
        """Begin the next step; if any rank has changed its facts, check that all ranks have the same.

        Raises:
            RankMismatchError: if they differ, or if a rank did not answer in time.
        """
        number = self._begun + 1
        if has_changed:
            self._changed = number
        # First the number, then the flag; `_on_request` does it the other way round. So it either answers for
        # this step, or this step waits for the agreement.
        self._begun = number
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
        answers = [store.get(key) if has_all or store.check([key]) else None for key in keys]
        if len(set(answers)) > 1:
            raise RankMismatchError(self._differences(answers))

    def _differences(self, answers: list[bytes | None]) -> dict[str, dict[str, tuple[int, ...]]]:
        facts = [
            {_SINCE: "no answer"} if each is None else decoded(dict[str, str], each, self._name)
            for each in answers
        ]
        if None in answers:
            facts = [{_SINCE: own.get(_SINCE, "")} for own in facts]
        found = differences(facts)
        if len(found) > 1:
            found.pop(_SINCE, None)  # differs as a consequence
        return {
            name: {value: tuple(self._ranks[place] for place in places) for value, places in values.items()}
            for name, values in found.items()
        }

    def _answer(self) -> str:
        return json.dumps({**self.facts(), _SINCE: str(self._changed)})

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"


def _call(method: Callable[[], Callable[[str], None] | None], text: str) -> None:
    """Call the method of a weak reference with a text, if its object still exists."""
    if (found := method()) is not None:
        found(text)


def _unsubscribe(monitor: RankMonitor, kind: str, _: object) -> None:
    monitor.unsubscribe(kind)

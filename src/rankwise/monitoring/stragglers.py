"""Report which rank the others wait for, while they wait; find a rank that hangs in its teardown."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.monitoring.heartbeat import LEAVING, TEARDOWN, Heartbeat, MonitoredRank, own_heartbeat
from rankwise.processes.exit_codes import write_stderr
from rankwise.stores.rendezvous import RankIdentity
from rankwise.stores.values import decoded

_LOOKS = 4  # how many times the ranks are looked at in the time after which one is reported
_SHORTEST_S, _LONGEST_S = 0.05, 86400.0
LEAST_TO_LEAVE_S = 30.0  # for a process to end threads, run exit hooks and take down the interpreter


@dataclass(eq=False, repr=False)
class _Reporter:
    """Write a line about each rank that is in a phase for `warn_after_s` while others wait for it."""

    warn_after_s: float = field(kw_only=True)  # also how often the line is repeated
    _most_named = 8  # of the ranks that wait
    _reported: dict[int, float] = field(default_factory=dict, init=False)  # when, by rank

    @property
    def interval_s(self) -> float:
        """How often to look at the ranks."""
        return min(max(self.warn_after_s / _LOOKS, _SHORTEST_S), _LONGEST_S)

    def _report_stragglers(
        self, statuses: Mapping[int, tuple[Heartbeat, str]], supervised: Mapping[int, Heartbeat]
    ) -> None:
        """Report stragglers by their status lines, but for those that `supervised` ranks wait for."""
        heartbeats = [heartbeat for heartbeat, _ in statuses.values()]
        stragglers = {
            rank: line
            for rank, (heartbeat, line) in statuses.items()
            if not heartbeat.waits
            and heartbeat.seconds_ago() > self.warn_after_s
            and _is_waited_for(heartbeat, heartbeats)
        }
        others = [line for rank, (_, line) in statuses.items() if rank not in stragglers]
        more = "" if len(others) <= self._most_named else f"; and {len(others) - self._most_named} more"
        for rank, line in stragglers.items():
            if rank not in supervised or not _is_waited_for(supervised[rank], supervised.values()):
                self._report(rank, f"{line}. The others wait: {'; '.join(others[: self._most_named])}{more}.")

    def _report(self, rank: int, text: str) -> None:
        """Write a text about a rank, if the last one is long enough ago."""
        now_s = time.monotonic()
        if now_s - self._reported.get(rank, -self.warn_after_s) >= self.warn_after_s:
            self._reported[rank] = now_s
            write_stderr(f"rankwise: {text}\n")


def _is_waited_for(heartbeat: Heartbeat, others: Iterable[Heartbeat]) -> bool:
    return any(other.waits_for(heartbeat) for other in others)


@final
@dataclass(eq=False, repr=False)
class LocalStragglerMonitor(_Reporter):
    """Report stragglers among the ranks of one supervisor."""

    workers: Sequence[MonitoredRank]  # the supervisor's list, which grows
    _most_named = sys.maxsize  # the ranks of one node are few
    _exit_since_s: float | None = field(default=None, init=False)

    def expect_exit(self) -> None:
        """Report processes that have not exited, from now on: the work is done, the main process waits."""
        if self._exit_since_s is None:
            self._exit_since_s = time.monotonic()

    def look(self) -> None:
        """Report."""
        running = [each for each in self.workers if not each.has_ended]
        if self._exit_since_s is None:
            statuses = {each.ranks.global_rank: (each.heartbeat.read(), each.status()) for each in running}
            self._report_stragglers(statuses, {})
        elif time.monotonic() - self._exit_since_s >= self.warn_after_s:
            for each in running:
                if each.process is not None:
                    text = f"{each.status()}. The main process waits for it to leave."
                    self._report(each.ranks.global_rank, text)


@final
@dataclass(eq=False, repr=False)
class StragglerMonitor(_Reporter):
    """Report stragglers where no supervisor sees all ranks: each writes its heartbeat, rank zero reports."""

    identities: Sequence[RankIdentity]  # by global rank
    own: RankIdentity
    # Whether a supervisor reports the stragglers of this node that other ranks of the node wait for.
    is_supervised: bool = field(default=False, kw_only=True)
    _looks: int = field(default=0, init=False)
    _seen: dict[RankIdentity, tuple[bytes, float]] = field(default_factory=dict, init=False)

    def look(self, store: dist.Store) -> None:
        """Write this rank's heartbeat; on rank zero, report."""
        if (heartbeat := own_heartbeat()) is not None:
            self._looks += 1  # so that only a suspended rank writes the same text twice
            text = json.dumps(
                [self._looks, heartbeat.step, heartbeat.seconds_ago(), heartbeat.waits, heartbeat.phase]
            )
            store.set(_key(self.own), text)
        if self.own.global_rank != 0:
            return
        heartbeats = self._read(store)
        here = [each for each in heartbeats if self.is_supervised and each.node_rank == self.own.node_rank]
        statuses = {each.global_rank: (beat, beat.status_of(str(each))) for each, beat in heartbeats.items()}
        self._report_stragglers(statuses, {each.global_rank: heartbeats[each] for each in here})

    def _read(self, store: dist.Store) -> dict[RankIdentity, Heartbeat]:
        heartbeats = {}
        for each in self.identities:
            if store.check([key := _key(each)]):
                text = bytes(store.get(key))
                if self._seen.get(each, (b"", 0.0))[0] != text:
                    self._seen[each] = (text, time.monotonic())
                with suppress(ProcessGroupError):  # a damaged one is left out
                    _, step, ago_s, waits, phase = decoded(tuple[int, int, float, bool, str], text, key)
                    # Each node has a clock of its own.
                    heartbeats[each] = Heartbeat(step, self._seen[each][1] - ago_s, waits, phase)
        return heartbeats


def _key(identity: RankIdentity) -> str:
    return f"heartbeat/{identity.global_rank}"


@dataclass(eq=False, repr=False)
class _Limit:
    """How long the local ranks may take for something. Call `look` every `interval_s`."""

    workers: Sequence[MonitoredRank]  # the supervisor's list, which grows
    limit_s: float | None  # None for no limit
    # Called once with the error and a rank: one that waits for the others, or has not ended.
    on_timeout: Callable[[MonitoredRank, Exception], None]
    _looks: ClassVar[int]  # within the limit

    @property
    def interval_s(self) -> float:
        """How often to look at the ranks."""
        return math.inf if self.limit_s is None else self.limit_s / self._looks


@final
@dataclass(eq=False, repr=False)
class TeardownTimeout(_Limit):
    """Find a rank whose teardown takes longer than a collective may, or whose process does not exit.

    A rank's work before its teardown has no limit, even when the others have finished, and neither has the
    rest of a re-run script after its jobs.
    """

    limit_s: float
    _looks = 8
    _last_look_s: float = field(default_factory=time.monotonic, init=False)
    _has_reported: bool = field(default=False, init=False)

    def look(self) -> None:
        """Report the ranks that hang."""
        ago_s, self._last_look_s = time.monotonic() - self._last_look_s, time.monotonic()
        if ago_s > 2 * self.interval_s:
            return  # this process was suspended, and the ranks perhaps with it
        hanging = [worker for worker in self.workers if self._hangs(worker)]
        if hanging and not self._has_reported:
            self._has_reported = True
            waiting = [worker for worker in self.workers if worker not in hanging]
            error = RendezvousTimeoutError("the end of the job", self.limit_s)
            self.on_timeout((waiting or hanging)[0], error)

    def _hangs(self, worker: MonitoredRank) -> bool:
        heartbeat = worker.heartbeat.read()
        limits = {TEARDOWN: self.limit_s, LEAVING: max(self.limit_s, LEAST_TO_LEAVE_S)}
        limit_s = limits.get(heartbeat.phase)
        return limit_s is not None and not worker.has_ended and heartbeat.seconds_ago() > limit_s


class TimeLimit(Exception):
    """A job took longer than it may."""


@final
@dataclass(eq=False, repr=False)
class JobTimeLimit(_Limit):
    """Find a job that takes longer than `limit_s`."""

    _looks = 20
    _since_s: float = field(default=math.inf, init=False)

    def begin(self) -> None:
        """Note that the job begins now."""
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Note that the job has ended."""
        self._since_s = math.inf

    def look(self) -> None:
        """Report a job that has taken too long."""
        left = [worker for worker in self.workers if not worker.has_ended]
        if self.limit_s is not None and left and time.monotonic() - self._since_s > self.limit_s:
            self.end()
            self.on_timeout(left[0], TimeLimit(f"{self.limit_s:g} s after the job had begun, its time limit"))


@final
@dataclass(eq=False, repr=False)
class StopTimeout:
    """Find ranks that were asked to stop at a boundary of their loop, and do not reach one.

    The limit is passed when no rank has begun another phase for longer than a collective may take. Call
    `look` several times within `timeout_s`.
    """

    workers: Sequence[MonitoredRank]  # the supervisor's list, which grows
    timeout_s: float | None  # None for no limit
    on_timeout: Callable[[int], None]  # called with the signal
    number: int | None = field(default=None, init=False)  # of the signal; None until the ranks were asked
    _since_s: float = field(default=0.0, init=False)
    _last_look_s: float = field(default=0.0, init=False)

    def begin(self, number: int) -> None:
        """Note that the ranks are asked now."""
        self.number = number
        self._since_s = time.monotonic()

    def look(self) -> None:
        """Report ranks that are stuck, once."""
        if self.timeout_s is None:
            return
        now_s = time.monotonic()
        ago_s, self._last_look_s = now_s - self._last_look_s, now_s
        if ago_s > self.timeout_s:  # this process was suspended, and the ranks perhaps with it
            self._since_s = max(self._since_s, now_s)
        begun_s = [worker.heartbeat.read().at_s for worker in self.workers if not worker.has_ended]
        if self.number is None or not begun_s:  # all have ended
            return
        if now_s - max(self._since_s, *begun_s) > self.timeout_s:
            self._since_s = math.inf
            self.on_timeout(self.number)

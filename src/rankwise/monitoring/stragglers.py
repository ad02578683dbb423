"""Report which rank the others wait for, while they wait; find a rank that hangs in its teardown."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import final

import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.monitoring.heartbeat import LEAVING, TEARDOWN, Heartbeat, MonitoredRank, own_heartbeat
from rankwise.processes.exit_codes import write_stderr
from rankwise.stores.rendezvous import RankIdentity
from rankwise.stores.values import decoded

# How many times the ranks are looked at in the time after which one is reported, or that a teardown takes,
# or a job.
_LOOKS, _TEARDOWN_LOOKS, _LIMIT_LOOKS = 4, 8, 20
_SHORTEST_S, _LONGEST_S = 0.05, 86400.0
# What a process has at least to exit: to end threads, run exit hooks and take down the interpreter.
LEAST_TO_LEAVE_S = 30.0


class _Reporter:
    """Write a line about each rank that is in a phase for `warn_after_s` while others wait for it.

    The line is repeated as often; `interval_s` is how often to look at the ranks.
    """

    _most_named = 8  # of the ranks that wait

    def __init__(self, warn_after_s: float) -> None:
        self.interval_s = min(max(warn_after_s / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._warn_after_s = warn_after_s
        self._reported: dict[int, float] = {}

    def _report_stragglers(
        self, statuses: Mapping[int, tuple[Heartbeat, str]], supervised: Mapping[int, Heartbeat]
    ) -> None:
        """Report stragglers; their supervisor reports the ones that `supervised` ranks wait for.

        `statuses` are heartbeats and status lines by global rank.
        """
        heartbeats = [heartbeat for heartbeat, _ in statuses.values()]
        stragglers = {
            rank: line
            for rank, (heartbeat, line) in statuses.items()
            if not heartbeat.waits
            and heartbeat.seconds_ago() > self._warn_after_s
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
        if now_s - self._reported.get(rank, -self._warn_after_s) >= self._warn_after_s:
            self._reported[rank] = now_s
            write_stderr(f"rankwise: {text}\n")


def _is_waited_for(heartbeat: Heartbeat, others: Iterable[Heartbeat]) -> bool:
    return any(other.waits_for(heartbeat) for other in others)


@final
class LocalStragglerMonitor(_Reporter):
    """Report stragglers among the ranks of one supervisor, whose list of workers grows."""

    _most_named = sys.maxsize  # the ranks of one node are few

    def __init__(self, workers: Sequence[MonitoredRank], warn_after_s: float) -> None:
        super().__init__(warn_after_s)
        self._workers = workers
        self._exit_since_s: float | None = None

    def expect_exit(self) -> None:
        """Report processes that have not exited, from now on: the work is done, the main process waits."""
        if self._exit_since_s is None:
            self._exit_since_s = time.monotonic()

    def look(self) -> None:
        """Report."""
        running = [each for each in self._workers if not each.has_ended]
        if self._exit_since_s is None:
            statuses = {each.ranks.global_rank: (each.heartbeat.read(), each.status()) for each in running}
            self._report_stragglers(statuses, {})
        elif time.monotonic() - self._exit_since_s >= self._warn_after_s:
            for each in running:
                if each.process is not None:
                    text = f"{each.status()}. The main process waits for it to leave."
                    self._report(each.ranks.global_rank, text)


@final
class StragglerMonitor(_Reporter):
    """Report stragglers where no supervisor sees all ranks.

    Each rank writes its heartbeat into the store at intervals; rank zero reads and reports.

    `identities` has all ranks, by global rank. With `is_supervised` a supervisor reports the
    stragglers of this node for which other ranks of it wait.
    """

    def __init__(
        self,
        identities: Sequence[RankIdentity],
        own: RankIdentity,
        warn_after_s: float,
        *,
        is_supervised: bool = False,
    ) -> None:
        super().__init__(warn_after_s)
        self._identities = identities
        self._own = own
        self._is_supervised = is_supervised
        self._looks = 0
        self._seen: dict[RankIdentity, tuple[bytes, float]] = {}

    def look(self, store: dist.Store) -> None:
        """Write this rank's heartbeat; on rank zero, report."""
        if (heartbeat := own_heartbeat()) is not None:
            self._looks += 1  # so that only a suspended rank writes the same text twice
            text = json.dumps(
                [self._looks, heartbeat.step, heartbeat.seconds_ago(), heartbeat.waits, heartbeat.phase]
            )
            store.set(_key(self._own), text)
        if self._own.global_rank == 0:
            heartbeats = self._read(store)
            supervised = {
                each.global_rank: heartbeat
                for each, heartbeat in heartbeats.items()
                if self._is_supervised and each.node_rank == self._own.node_rank
            }
            self._report_stragglers(
                {each.global_rank: (beat, beat.status_of(str(each))) for each, beat in heartbeats.items()},
                supervised,
            )

    def _read(self, store: dist.Store) -> dict[RankIdentity, Heartbeat]:
        heartbeats = {}
        for each in self._identities:
            if store.check([_key(each)]):
                text = bytes(store.get(_key(each)))
                if self._seen.get(each, (b"", 0.0))[0] != text:
                    self._seen[each] = (text, time.monotonic())
                with suppress(ProcessGroupError):  # a damaged one is left out
                    _, step, ago_s, waits, phase = decoded(
                        tuple[int, int, float, bool, str], text, _key(each)
                    )
                    # Each node has a clock of its own.
                    heartbeats[each] = Heartbeat(step, self._seen[each][1] - ago_s, waits, phase)
        return heartbeats


def _key(identity: RankIdentity) -> str:
    return f"heartbeat/{identity.global_rank}"


@final
class TeardownTimeout:
    """Find a rank whose teardown takes longer than a collective may, or whose process does not exit.

    A rank's work before its teardown has no limit, even when the others have finished, and neither has the
    rest of a re-run script after its jobs. `workers` is the supervisor's list, which grows. `on_timeout` is
    called once, with a rank that waits for the one that hangs, and the error. Call `look` every `interval_s`.
    """

    def __init__(
        self,
        workers: Sequence[MonitoredRank],
        timeout_s: float,
        on_timeout: Callable[[MonitoredRank, Exception], None],
    ) -> None:
        self.interval_s = timeout_s / _TEARDOWN_LOOKS
        self._workers = workers
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._last_look_s = time.monotonic()
        self._has_reported = False

    def look(self) -> None:
        """Report the ranks that hang."""
        ago_s, self._last_look_s = time.monotonic() - self._last_look_s, time.monotonic()
        if ago_s > 2 * self.interval_s:
            return  # this process was suspended, and the ranks perhaps with it
        hanging = [worker for worker in self._workers if self._hangs(worker)]
        if hanging and not self._has_reported:
            self._has_reported = True
            waiting = [worker for worker in self._workers if worker not in hanging]
            error = RendezvousTimeoutError("the end of the job", self._timeout_s)
            self._on_timeout((waiting or hanging)[0], error)

    def _hangs(self, worker: MonitoredRank) -> bool:
        heartbeat = worker.heartbeat.read()
        limits = {TEARDOWN: self._timeout_s, LEAVING: max(self._timeout_s, LEAST_TO_LEAVE_S)}
        limit_s = limits.get(heartbeat.phase)
        return limit_s is not None and not worker.has_ended and heartbeat.seconds_ago() > limit_s


class TimeLimit(Exception):
    """A job took longer than it may."""


@final
class JobTimeLimit:
    """Find a job that takes longer than `limit_s`; with None there is no limit.

    `workers` is the supervisor's list, which grows. `on_timeout` is called once, with a rank that has not
    ended, and the error. Call `look` every `interval_s`.
    """

    def __init__(
        self,
        workers: Sequence[MonitoredRank],
        limit_s: float | None,
        on_timeout: Callable[[MonitoredRank, Exception], None],
    ) -> None:
        self._since_s = math.inf
        self.interval_s = math.inf if limit_s is None else limit_s / _LIMIT_LOOKS
        self._workers = workers
        self._limit_s = limit_s
        self._on_timeout = on_timeout

    def begin(self) -> None:
        """Note that the job begins now."""
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Note that the job has ended."""
        self._since_s = math.inf

    def look(self) -> None:
        """Report a job that has taken too long."""
        left = [worker for worker in self._workers if not worker.has_ended]
        if self._limit_s is not None and left and time.monotonic() - self._since_s > self._limit_s:
            self.end()
            self._on_timeout(
                left[0], TimeLimit(f"{self._limit_s:g} s after the job had begun, its time limit")
            )


@final
class StopTimeout:
    """Find ranks that were asked to stop at a boundary of their loop, and do not reach one.

    The limit is passed when no rank has begun another phase for longer than a collective may take. `workers`
    is the supervisor's list, which grows. `on_timeout` is called with the signal. Call `look` several times
    within `timeout_s`; with None there is no limit.

    Attributes:
        number: the signal for which the ranks were asked to stop; None until then.
    """

    def __init__(
        self, workers: Sequence[MonitoredRank], timeout_s: float | None, on_timeout: Callable[[int], None]
    ) -> None:
        self.number: int | None = None
        self._workers = workers
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._on_timeout = on_timeout
        self._since_s = self._last_look_s = 0.0

    def begin(self, number: int) -> None:
        """Note that the ranks are asked now."""
        self.number = number
        self._since_s = time.monotonic()

    def look(self) -> None:
        """Report ranks that are stuck, once."""
        now_s = time.monotonic()
        ago_s, self._last_look_s = now_s - self._last_look_s, now_s
        if ago_s > self._timeout_s:  # this process was suspended, and the ranks perhaps with it
            self._since_s = max(self._since_s, now_s)
        begun_s = [worker.heartbeat.read().at_s for worker in self._workers if not worker.has_ended]
        if self.number is None or not begun_s:  # all have ended
            return
        if now_s - max(self._since_s, *begun_s) > self._timeout_s:
            self._since_s = math.inf
            self._on_timeout(self.number)

"""Report on stderr which rank the others wait for, while they wait."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch.distributed as dist

from rankwise.errors import RankwiseError
from rankwise.monitoring.heartbeat import Heartbeat, own_heartbeat
from rankwise.monitoring.monitored_rank import MonitoredRank
from rankwise.processes.stderr import write_stderr
from rankwise.stores.rendezvous import RankIdentity

__all__ = ["LocalStragglerMonitor", "StragglerMonitor"]

# How many looks there are in the time after which a rank is reported.
_LOOKS = 4
_SHORTEST_S, _LONGEST_S = 0.05, 86400.0  # the latter as poll(2) takes milliseconds in an int
_MOST_NAMED = 8
_CLOSE_S = 1.0


@final
class StragglerMonitor:
    """Each rank writes its heartbeat into the store at intervals; rank zero reads and reports stragglers.

    Args:
        open_store: opens the job's store once more, as the others may be waited in; called in a thread.
        places: all ranks, by global rank.
        mine: this rank's place.
        warn_after_s: after how long in one phase a rank lags, if others wait meanwhile.
        is_supervised: whether a supervisor reports on the same stderr which rank of this node holds up
            another one of it.
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        places: Sequence[RankIdentity],
        mine: RankIdentity,
        warn_after_s: float,
        *,
        is_supervised: bool = False,
    ) -> None:
        self._open_store = open_store
        self._interval_s = min(max(warn_after_s / _LOOKS, _SHORTEST_S), _LONGEST_S)
        self._places = places
        self._mine = mine
        self._warn_after_s = warn_after_s
        self._is_supervised = is_supervised
        self._looks = 0
        self._seen: dict[RankIdentity, tuple[bytes, float]] = {}
        self._reported: dict[RankIdentity, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rankwise-lag-watch", daemon=True)

    def start(self) -> None:
        """Begin to look; a job that is over before the first look costs a thread that sleeps."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; leave it to itself where the store does not answer."""
        self._is_over.set()
        self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        store: dist.Store | None = None
        try:
            while not self._is_over.wait(self._interval_s):
                store = self._open_store() if store is None else store
                self.look(store)
        except (RuntimeError, ValueError, RankwiseError):
            return  # the store is gone

    def look(self, store: dist.Store) -> None:
        """Write where this rank is; on rank zero, report."""
        if (heartbeat := own_heartbeat()) is not None:
            self._looks += 1  # a rank that is suspended writes no new text
            text = json.dumps(
                [self._looks, heartbeat.step, heartbeat.seconds_ago(), heartbeat.waits, heartbeat.phase]
            )
            store.set(_key(self._mine), text)
        if self._mine.global_rank == 0:
            self._report(self._read(store))

    def _read(self, store: dist.Store) -> dict[RankIdentity, Heartbeat]:
        heartbeats = {}
        for place in self._places:
            if store.check([_key(place)]):
                text = bytes(store.get(_key(place)))
                if self._seen.get(place, (b"", 0.0))[0] != text:
                    self._seen[place] = (text, time.monotonic())
                _, step, ago_s, waits, phase = json.loads(text)
                # Each node has a clock of its own.
                heartbeats[place] = Heartbeat(step, self._seen[place][1] - ago_s, waits, phase)
        return heartbeats

    def _report(self, heartbeats: Mapping[RankIdentity, Heartbeat]) -> None:
        lagging = [place for place, heartbeat in heartbeats.items() if self._lags(heartbeat, heartbeats)]
        others = [_line(place, heartbeat) for place, heartbeat in heartbeats.items() if place not in lagging]
        more = "" if len(others) <= _MOST_NAMED else f"; and {len(others) - _MOST_NAMED} more"
        now_s = time.monotonic()
        for place in lagging:
            if self._is_reported_here(place, heartbeats):
                continue
            if now_s - self._reported.get(place, -self._warn_after_s) >= self._warn_after_s:
                self._reported[place] = now_s
                waiting = "; ".join(others[:_MOST_NAMED])
                write_stderr(
                    f"rankwise: {_line(place, heartbeats[place])}. The others wait: {waiting}{more}.\n"
                )

    def _lags(self, heartbeat: Heartbeat, heartbeats: Mapping[RankIdentity, Heartbeat]) -> bool:
        is_late = not heartbeat.waits and heartbeat.seconds_ago() > self._warn_after_s
        return is_late and _holds_up(heartbeat, heartbeats.values())

    def _is_reported_here(self, lagging: RankIdentity, heartbeats: Mapping[RankIdentity, Heartbeat]) -> bool:
        """Return whether the supervisor of this node sees as much: a rank of it, and one that waits."""
        here = [
            heartbeat for place, heartbeat in heartbeats.items() if place.node_rank == self._mine.node_rank
        ]
        is_here = lagging.node_rank == self._mine.node_rank
        return self._is_supervised and is_here and _holds_up(heartbeats[lagging], here)


def _holds_up(lagging: Heartbeat, heartbeats: Iterable[Heartbeat]) -> bool:
    return any(heartbeat.waits_for(lagging) for heartbeat in heartbeats)


def _key(place: RankIdentity) -> str:
    return f"heartbeat/{place.global_rank}"


def _line(place: RankIdentity, heartbeat: Heartbeat) -> str:
    return f"{place} was last in {heartbeat.where()}, {heartbeat.seconds_ago():.0f} s ago"


@final
class LocalStragglerMonitor:
    """Look at the ranks' heartbeats now and then; report who lags on stderr, again and again while it does.

    Args:
        members: all local ranks; the list is the supervisor's, and grows.
        warn_after_s: after how long in one phase a rank lags, if others wait meanwhile.
    """

    def __init__(self, workers: Sequence[MonitoredRank], warn_after_s: float) -> None:
        self._workers = workers
        self._warn_after_s = warn_after_s
        self._next_look_s = time.monotonic() + warn_after_s / _LOOKS
        self._reported: dict[int, float] = {}
        self._leaving_since_s: float | None = None

    def expect_exit(self) -> None:
        """Report, from now on, who has not left yet: the work is done, and the main process waits."""
        if self._leaving_since_s is None:
            self._leaving_since_s = time.monotonic()

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for a rank that is alone."""
        return None if len(self._workers) < 2 else max(0.0, self._next_look_s - time.monotonic())

    def look(self) -> None:
        """Report, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._warn_after_s / _LOOKS
        if self._leaving_since_s is not None:
            if now_s - self._leaving_since_s >= self._warn_after_s:
                self._report(_still_there(self._workers), "The main process waits for it to leave.")
            return
        lagging = laggards(self._workers, self._warn_after_s)
        others = [other for other in self._workers if other not in lagging]
        self._report(lagging, f"The others wait: {joined(others)}.")

    def _report(self, workers: Sequence[MonitoredRank], who_waits: str) -> None:
        now_s = time.monotonic()
        for member in workers:
            rank = member.ranks.global_rank
            if now_s - self._reported.get(rank, 0.0) >= self._warn_after_s:
                self._reported[rank] = now_s
                write_stderr(f"rankwise: {member.status()}. {who_waits}\n")


def laggards(workers: Sequence[MonitoredRank], after_s: float) -> list[MonitoredRank]:
    """Return the ranks that have been in one phase for that long, while others wait or are further on."""
    heartbeats = [(member, member.heartbeat.read()) for member in workers if not member.has_ended]
    return [
        member
        for member, heartbeat in heartbeats
        if not heartbeat.waits
        and heartbeat.seconds_ago() > after_s
        and any(other.waits_for(heartbeat) for _, other in heartbeats)
    ]


def _still_there(workers: Sequence[MonitoredRank]) -> list[MonitoredRank]:
    return [member for member in workers if member.process is not None and not member.has_ended]


def joined(workers: Iterable[MonitoredRank]) -> str:
    """Return where ranks are, in one line."""
    return "; ".join(member.status() for member in workers)

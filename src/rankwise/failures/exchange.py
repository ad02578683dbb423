"""What ranks tell one another through the store when a job fails that no supervisor sees as a whole."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch.distributed as dist

from rankwise.errors import NodesLostError
from rankwise.failures.classify import text_of
from rankwise.failures.record import FailureRecord
from rankwise.monitoring.flight_recorder import write_flight_record
from rankwise.monitoring.heartbeat import FailureTime, failure_time_of
from rankwise.monitoring.rank_monitor import StatusReply, notify_failure, query_status, reply_key
from rankwise.ranks import RankInfo
from rankwise.stores.endpoint import RendezvousEndpoint, store_of_job
from rankwise.stores.rendezvous import FAILURE, RankIdentity, RemoteFailure, read_key
from rankwise.stores.tcp import forget_store, hosted_here, open_another

__all__ = [
    "CrossNodeFailures",
    "FailureExchange",
    "StatusReport",
    "publish_failure",
    "published_failure",
    "resolve_cause",
    "wait_for_other_nodes",
    "wait_until_read",
]

_log = logging.getLogger(__name__)

_COUNT, _ALL_DONE = "done", b"all are done"
# How long the rank that failed first has to say so, once others feel it, and how long the store may take.
_PATIENCE = timedelta(seconds=0.7)
_LIMIT_S = 1.5
# How long whoever has the store stays, so that the others can read what has failed.
_LINGER_S = 1.0
# How long a rank that is done waits for those of other nodes, and how often it looks.
_LONGEST_WAIT = timedelta(minutes=10)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
# A slow resolver delays a connection to a TCPStore by 5 s.
_STORE_LIMIT = timedelta(seconds=12)
# How long a process has to leave a job before the store that it hosts is dropped.
_LEAVE_S = 1.0


@final
@dataclass(frozen=True)
class StatusReport:
    """What the ranks have answered.

    Attributes:
        missing: the global ranks that hold the others up: they do not wait, or do not answer.
        last_seen: where each of the others is, in a line.
        lost: those that do not answer.
    """

    missing: tuple[int, ...]
    last_seen: tuple[str, ...]
    lost: tuple[RankIdentity, ...]


@final
class FailureExchange:
    """One rank's way to say why it ends, and to hear why it has to.

    Args:
        store: the job's own.
        places: all ranks, by global rank.
        mine: this rank's place.
    """

    def __init__(self, store: dist.Store, places: Sequence[RankIdentity], mine: RankIdentity) -> None:
        self.began_s = time.monotonic()
        self.is_one_node = len({place.node_rank for place in places}) == 1
        self._store = store
        self._places = places
        self._mine = mine
        self._heard: bytes | None = None

    def say(self, record: bytes) -> None:
        """Leave this rank's failure for the others, unless one is there already."""
        self._within_limit(lambda: publish_failure(self._store, record, len(self._places)))

    def note(self, record: bytes) -> None:
        """Keep what another rank has left: the store may be gone when this one asks."""
        self._heard = record

    def wait_until_read(self) -> None:
        """Stay until the other ranks have read what has failed, if something has: this rank has the store."""

        def wait() -> None:
            if published_failure(self._store) is not None:
                ranks = {place.global_rank for place in self._places}
                wait_until_read(self._store, ranks - {self._mine.global_rank})

        self._within_limit(wait)

    def wait_for_other_ranks(self, patience: timedelta = _LONGEST_WAIT) -> bytes | NodesLostError | None:
        """Say that this rank is done, and wait until all are.

        Returns:
            The record of a rank that failed instead; or which ranks do not answer at the end of this one's
            patience; None where all are done, work on, or are gone with the store.
        """
        if not self._within_limit(self._count_me):
            return self._heard
        deadline = time.monotonic() + patience.total_seconds()
        pause_s = _FIRST_PAUSE_S
        heard: list[bytes] = []
        while self._within_limit(lambda: self._listen(heard)):
            if heard:
                return None if heard == [_ALL_DONE] else heard[0]
            if time.monotonic() > deadline:
                answer = self.hear(TimeoutError(f"done, and waited {patience} for the others"))
                return None if isinstance(answer, StatusReport) else answer
            time.sleep(pause_s)  # and not in the store, in C++, where no signal is heard
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._heard

    def _count_me(self) -> None:
        if self._store.add(_COUNT, 1) == len(self._places):
            self._store.compare_set(FAILURE, "", _ALL_DONE.decode())

    def _listen(self, heard: list[bytes]) -> None:
        if self._store.check([FAILURE]):
            heard.append(bytes(self._store.get(FAILURE)))

    def hear(
        self, error: BaseException, *, is_timeout: bool = False
    ) -> bytes | NodesLostError | StatusReport:
        """Find out why a collective failed here with `error`.

        Args:
            error: what was raised here.
            is_timeout: whether it says that others did not come in time; the ranks then show their stacks.

        Returns:
            The record of the rank that failed first; or which ranks are not to be heard of any more, if whole
            nodes are not or nobody was late; or else what all have answered.
        """
        if self._heard is not None:
            return self._heard
        heard: list[bytes | StatusReport] = []
        gave_up = failure_time_of(error) if is_timeout else None
        if not self._within_limit(lambda: heard.append(self._query_status(gave_up))):
            # The store is with node 0: from elsewhere that node is away, from there all others are.
            is_with_the_store = self._mine.node_rank == 0
            lost = (place for place in self._places if (place.node_rank == 0) != is_with_the_store)
            heard.append(StatusReport((), (), tuple(lost)))
        [answer] = heard
        if isinstance(answer, StatusReport) and (
            self._misses_a_node(answer) or (answer.lost and not is_timeout)
        ):
            return NodesLostError(tuple(map(str, answer.lost)), f"{type(error).__name__}: {text_of(error)}")
        return answer

    def _misses_a_node(self, roll: StatusReport) -> bool:
        there = {place.node_rank for place in self._places if place not in roll.lost}
        return any(place.node_rank not in there for place in roll.lost)

    def _query_status(self, gave_up: FailureTime | None) -> bytes | StatusReport:
        self._store.set(reply_key(self._mine.global_rank), StatusReply.of_this_rank(self._mine, gave_up))
        query_status(self._store, len(self._places), "" if gave_up is None else "a collective timed out")
        try:
            self._store.wait([FAILURE], _PATIENCE)
            return bytes(self._store.get(FAILURE))
        except dist.DistStoreError:
            return self._roll()

    def _roll(self) -> StatusReport:
        keys = {place: reply_key(place.global_rank) for place in self._places}
        answers = {
            place: StatusReply(self._store.get(key))
            for place, key in keys.items()
            if self._store.check([key])
        }
        lost = tuple(place for place in self._places if place not in answers)
        others = [place for place in self._places if place.global_rank != self._mine.global_rank]
        return StatusReport(
            tuple(place.global_rank for place in others if place in lost or not answers[place].waits),
            tuple(f"{each} does not answer" if each in lost else answers[each].line for each in others),
            lost,
        )

    def _within_limit(self, call: Callable[[], object]) -> bool:
        """Run a call to the store that may never come back, as over a cable that is cut."""
        done = threading.Event()

        def run() -> None:
            try:
                call()
            except (RuntimeError, ValueError):
                return  # the store is gone
            done.set()

        thread = threading.Thread(target=run, name="rankwise-last-words", daemon=True)
        thread.start()
        thread.join(_LIMIT_S)
        return done.is_set()


def publish_failure(store: dist.Store, record: bytes, count: int) -> None:
    """Leave a failure for all ranks of a job, unless one is there, or all are done; and wake them.

    Args:
        store: the job's.
        record: what has failed.
        count: how many ranks there are.
    """
    text = record.decode()
    if store.compare_set(FAILURE, "", text) == record:
        notify_failure(store, count)


def published_failure(store: dist.Store) -> bytes | None:
    """Return the record of the rank that failed first, None where none has."""
    left = bytes(store.get(FAILURE)) if store.check([FAILURE]) else _ALL_DONE
    return None if left == _ALL_DONE else left


def wait_until_read(store: dist.Store, ranks: Iterable[int]) -> None:
    """Give ranks the time to read what has failed: without whoever has the store, they no longer could."""
    keys = [read_key(rank) for rank in ranks]
    deadline = time.monotonic() + _LINGER_S
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_LINGER_S / 50)  # and not in the store, which writes on stderr where it waits in vain


def wait_for_other_nodes(failure_exchange: FailureExchange | None) -> None:
    """Wait until the ranks of all nodes are done, so that what fails on one has failed on all.

    Raises:
        RemoteFailure: where one has failed; `resolve_cause` turns it into that failure.
        NodesLostError: where one is not to be heard of any more.
    """
    if failure_exchange is None or failure_exchange.is_one_node:
        return  # whoever started them sees all
    heard = failure_exchange.wait_for_other_ranks()
    if isinstance(heard, NodesLostError):
        raise heard
    if heard is not None:
        raise RemoteFailure(heard)


def resolve_cause(
    error: BaseException, ranks: RankInfo, failure_exchange: FailureExchange | None
) -> tuple[BaseException, FailureRecord]:
    """Return what this rank raises and what it reports; on several nodes both may be another rank's.

    A failure of this rank's own is left for the other nodes; one that echoes another's is looked up. One that
    waited in vain says where the others are.
    """
    if isinstance(error, RemoteFailure):
        return _as_here(error.record)
    record = FailureRecord.of_exception(ranks, error)
    if not isinstance(error, Exception):
        return error, record
    if record.is_timeout and (path := write_flight_record(ranks.global_rank)):
        note = f"the flight record of global_rank={ranks.global_rank} is {path}"
        record = dataclasses.replace(record, notes=(note,))
    if failure_exchange is None or (failure_exchange.is_one_node and not record.is_timeout):
        return error, record
    if not (record.is_consequence or record.is_timeout):
        failure_exchange.say(record.to_json())
        return error, record
    return _looked_up(error, record, ranks, failure_exchange)


def _looked_up(
    error: Exception, record: FailureRecord, ranks: RankInfo, failure_exchange: FailureExchange
) -> tuple[BaseException, FailureRecord]:
    heard = failure_exchange.hear(error, is_timeout=record.is_timeout)
    if not isinstance(heard, StatusReport) and record.has_own_words:
        _log.warning("%s: a consequence of what ended the job.", record.line())  # which is raised instead
    if isinstance(heard, NodesLostError):
        return heard, FailureRecord.of_exception(ranks, heard)
    if isinstance(heard, StatusReport):
        if not record.is_timeout:
            return error, record
        record = dataclasses.replace(record, missing=heard.missing, last_seen=heard.last_seen)
        return record.to_error(failure_exchange.began_s, (), ()), record
    return _as_here(heard, record)


def _as_here(heard: bytes, *others: FailureRecord) -> tuple[BaseException, FailureRecord]:
    # Each node has a clock of its own.
    first = dataclasses.replace(FailureRecord.from_json(heard), at_s=time.monotonic())
    return first.to_error(time.monotonic(), (), others), first


@final
class CrossNodeFailures:
    """Tell the ranks of other nodes of an end that no rank could tell them.

    Which ended by a signal, or `os._exit`; or in whatever way before it had met them.

    Args:
        meeting: where the nodes of the job meet; None for a job on one node, which has nobody to tell.
        ranks: those of this node's first process.

    Attributes:
        job: counts the jobs that meet there, as the worker contexts do.
    """

    def __init__(self, endpoint: RendezvousEndpoint | None, ranks: RankInfo, job: int = 1) -> None:
        self.job = job
        self._endpoint = endpoint
        self._ranks = ranks
        self._publishing: threading.Thread | None = None

    def tell(self, record: FailureRecord) -> None:
        """Leave a record in the job's store, in a thread: the store may be out of reach."""
        if self._endpoint is None or self._publishing is not None or not self._has_to_publish(record):
            return
        self._publishing = threading.Thread(
            target=self._publish, args=(record,), name="rankwise-other-nodes", daemon=True
        )
        self._publishing.start()

    def wait_until_published(self) -> None:
        """Give what is being told the time to arrive; and where the store is here, to be read."""
        if self._publishing is not None:
            self._publishing.join(_STORE_LIMIT.total_seconds())
        if self._endpoint is not None and self._endpoint.hosts:
            _in_reach(self._wait_until_read)

    def forget_store_soon(self, is_in_job: Callable[[], bool]) -> None:
        """Let go of the store where it is here, and this process is in its job still: a wait in it ends so.

        Such a wait is in C++ and hears no signal. The ranks of other nodes get the time to read what failed.
        """
        if self._endpoint is None or not self._endpoint.hosts:
            return
        timer = threading.Timer(_LEAVE_S, self._forget_store, (self._endpoint.address, is_in_job))
        timer.daemon = True
        timer.start()

    def _forget_store(self, address: tuple[str, int], is_in_job: Callable[[], bool]) -> None:
        self.wait_until_published()
        if is_in_job():
            forget_store(address)

    def _has_to_publish(self, record: FailureRecord) -> bool:
        is_ours = record.node_rank == self._ranks.node_rank
        is_cause = not (record.is_consequence or record.is_timeout)
        return is_ours and is_cause and (record.exit_status is not None or not record.has_met)

    def _publish(self, record: FailureRecord) -> None:
        _in_reach(lambda: publish_failure(self._store(), record.to_json(), self._ranks.world_size))

    def _wait_until_read(self) -> None:
        store = self._store()
        if (left := published_failure(store)) is not None:
            nodes = {self._ranks.node_rank, FailureRecord.from_json(left).node_rank}
            size = self._ranks.local_world_size
            everyone = range(self._ranks.world_size)
            wait_until_read(store, [rank for rank in everyone if rank // size not in nodes])

    def _store(self) -> dist.Store:
        if self._endpoint is None:
            raise ValueError("a job on one node has no other nodes")
        address = self._endpoint.address
        store = hosted_here(address) if self._endpoint.hosts else open_another(address, _STORE_LIMIT)
        return store_of_job(store, self.job)


def _in_reach(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # noqa: BLE001  a store that is gone, or never was: nobody is left to tell
        return

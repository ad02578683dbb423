"""Publish failures, and query the ranks' status, through the job's store if no supervisor sees all ranks."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, TypeVar, final

import torch.distributed as dist

from rankwise.errors import NodesLostError, PeerAuthenticationError, ProcessGroupError, text_of
from rankwise.failures.classify import is_of_user_code
from rankwise.failures.record import FailureRecord
from rankwise.monitoring.heartbeat import FailureTime, failure_time_of, own_heartbeat
from rankwise.monitoring.rank_monitor import PollingMonitor, RankMonitor, send_message
from rankwise.monitoring.stacks import write_flight_record
from rankwise.processes.exit_codes import write_stderr
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import FAILURE, RankIdentity, RemoteFailure, read_key
from rankwise.stores.sealed import job_key_of_environment
from rankwise.stores.tcp import RendezvousEndpoint, forget_store, hosted_here, open_another, store_of_job
from rankwise.stores.values import read_value
from rankwise.stores.waiting import OUT_OF_REACH, call_store, poll_until, wait_for_keys

_log = logging.getLogger(__name__)

T = TypeVar("T")
_Reply = tuple[bool, str] | None  # what `own_status` has; None where a rank has not replied

_KIND = "failure"
_STATUS = "status"  # the kind of a status query; one with a reason is for stacks too
_STDERR = 2
_DONE_COUNT, _ALL_DONE = "done", b"all are done"
_PUBLISH_TIMEOUT = timedelta(seconds=0.7)  # for the rank that failed first, once others fail in consequence
# How long a few requests to the store may take together; and how much longer one for each rank.
_REQUESTS_S, _REQUEST_OF_A_RANK_S = 1.5, 0.001
_COLLECT_S = 0.5  # for the rank that collects the replies to a status query; then each rank reads them itself
_READ_TIMEOUT = timedelta(seconds=1)  # for the other ranks to read what has failed, before the store ends
_LONGEST_WAIT = timedelta(minutes=10)  # of a rank that is done, for ranks of other nodes
_CONNECT_TIMEOUT = timedelta(seconds=12)  # a slow resolver delays a connection to a TCPStore by 5 s
_LEAVE_S = 1.0  # for a process to leave a job before the store that it hosts is dropped


def own_status(own: RankIdentity, gave_up: FailureTime | None = None) -> str:
    """Return as JSON whether this rank waits for others, or `gave_up` to do so, and a line with its phase."""
    heartbeat = own_heartbeat() if gave_up is None else gave_up.heartbeat
    waits = gave_up is not None or (heartbeat is not None and heartbeat.waits)
    return json.dumps([waits, f"{own} is there" if heartbeat is None else heartbeat.status_of(str(own))])


def reply_to_status_queries(monitor: RankMonitor, own: RankIdentity, *, shows_stacks: bool) -> None:
    """Reply to the first status query of the job.

    With `shows_stacks` this rank also writes its stacks to stderr where the query has a reason.
    """

    def reply(reason: str) -> None:
        # A rank whose own wait has timed out has left its reply already.
        monitor.set_once(reply_key(own.global_rank), own_status(own))
        if shows_stacks and reason:
            write_stderr(f"rankwise: {reason}; stacks of {own}:\n")
            faulthandler.dump_traceback(_STDERR, all_threads=True)

    monitor.subscribe(_STATUS, reply)


def reply_key(rank: int) -> str:
    """Return the key of a rank's reply."""
    return f"status/{rank}"


def collector_key(reason: str) -> str:
    """Return the key of the rank that collects the replies to the queries with a reason: the first to ask."""
    return f"status of {reason!r}/collector"


def report_key(reason: str) -> str:
    """Return the key of the replies that were collected, by global rank."""
    return f"status of {reason!r}/replies"


@final
class StatusReport(NamedTuple):
    """The replies of the ranks to a status query."""

    missing: tuple[int, ...]  # the global ranks that the others wait for: they do not wait, or do not reply
    last_seen: tuple[str, ...]  # where each other rank is, in a line
    lost: tuple[RankIdentity, ...]  # the ranks that do not reply


@final
@dataclass(eq=False)
class FailureExchange:
    """Publish why this rank ends, and find out why another one ended."""

    store: dist.Store
    identities: Sequence[RankIdentity]  # by global rank
    own: RankIdentity
    began_s: float = field(default_factory=time.monotonic, init=False)
    _received: bytes | None = field(default=None, init=False)

    def subscribe(self, monitor: PollingMonitor, on_failure: Callable[[bytes], None]) -> None:
        """Call `on_failure` in the monitor's thread with the first failure's record, also this rank's own."""

        def receive(_: str) -> None:
            if (record := published_failure(monitor.thread_store)) is not None:
                self._received = record  # the store may be gone when this rank asks for it
                on_failure(record)
                monitor.set_once(read_key(self.own.global_rank), "1")

        monitor.subscribe(_KIND, receive)

    def publish(self, record: bytes) -> None:
        """Publish this rank's failure, unless another one is published already."""
        call_store(lambda: publish_failure(self.store, record, len(self.identities)), _REQUESTS_S)

    def wait_until_read(self) -> None:
        """Wait a little until the other ranks have read a failure; for the rank that hosts the store."""
        others = {each.global_rank for each in self.identities} - {self.own.global_rank}
        call_store(lambda: _wait_until_read(self.store, others), _REQUESTS_S)

    def wait_for_other_ranks(self, timeout: timedelta = _LONGEST_WAIT) -> None:
        """Wait until all ranks are done, so that a failure on one node fails the job on all.

        The wait also ends when the others still run after `timeout`, or when the store is gone.

        Raises:
            RemoteFailure: when a rank has failed; `resolve_cause` turns it into that failure.
            NodesLostError: when ranks do not reply after `timeout`.
            PeerAuthenticationError: when no rank has written what the store has as a failure.
        """
        outcome = b""

        def is_over() -> bool:
            nonlocal outcome
            answer = _call_checked(lambda: _outcome(self.store), _REQUESTS_S)
            outcome = answer[0] if answer else self._received or _ALL_DONE
            return outcome != b""

        if not _call_checked(self._count_as_done, _REQUESTS_S):
            outcome = self._received or _ALL_DONE
        elif not poll_until(is_over, timeout):
            cause = self.find_cause(TimeoutError(f"done, and waited {timeout} for the others"))
            if isinstance(cause, NodesLostError | PeerAuthenticationError):
                raise cause
            outcome = cause if isinstance(cause, bytes) else _ALL_DONE
        if outcome != _ALL_DONE:
            raise RemoteFailure(outcome)

    def _count_as_done(self) -> None:
        if self.store.add(_DONE_COUNT, 1) == len(self.identities):
            self.store.compare_set(FAILURE, "", _ALL_DONE.decode())

    def find_cause(
        self, error: BaseException, *, is_timeout: bool = False
    ) -> bytes | NodesLostError | PeerAuthenticationError | StatusReport:
        """Find out why a collective failed here with `error`.

        After a timeout the ranks also show their stacks. Returns the record of the rank that failed first, if
        there is one, or the error of a record that no rank has written. Otherwise returns the ranks that do
        not reply, if a whole node does not reply or the error is not a timeout; else all replies.
        """
        if self._received is not None:
            return self._received
        limit_s = _REQUESTS_S + 2 * self._each_rank_s
        try:
            found = _call_checked(lambda: self._record_or_report(error, is_timeout), limit_s)
        except PeerAuthenticationError as forged:
            return forged
        if found:
            cause = found[0]
        else:
            # Node 0 hosts the store: for other nodes that node is lost, for node 0 all others are.
            is_host = self.own.node_rank == 0
            lost = (each for each in self.identities if (each.node_rank == 0) != is_host)
            cause = StatusReport((), (), tuple(lost))
        if isinstance(cause, bytes):
            return cause
        replied = {each.node_rank for each in self.identities if each not in cause.lost}
        misses_a_node = any(each.node_rank not in replied for each in cause.lost)
        if misses_a_node or (cause.lost and not is_timeout):
            return NodesLostError(tuple(map(str, cause.lost)), f"{type(error).__name__}: {text_of(error)}")
        return cause

    def _record_or_report(self, error: BaseException, is_timeout: bool) -> bytes | StatusReport:
        gave_up = failure_time_of(error) if is_timeout else None
        self.store.set(reply_key(self.own.global_rank), own_status(self.own, gave_up))
        reason = "a collective timed out" if is_timeout else ""
        own = str(self.own.global_rank)
        collects = self.store.compare_set(collector_key(reason), "", own) == own.encode()
        if collects:
            send_message(self.store, range(len(self.identities)), _STATUS, reason)
        if wait_for_keys(self.store, [FAILURE], _PUBLISH_TIMEOUT):
            return bytes(self.store.get(FAILURE))
        replies = [] if collects else self._collected(report_key(reason))
        replies = self._replies(replies or [None] * len(self.identities))
        if collects:
            self.store.set(report_key(reason), json.dumps(replies))
        return self._status_report(replies)

    def _collected(self, key: str) -> list[_Reply]:
        """Return the replies of all ranks that the collector has published; nothing without them."""
        if wait_for_keys(self.store, [key], timedelta(seconds=_COLLECT_S + self._each_rank_s)):
            with suppress(ProcessGroupError):  # damaged
                replies = read_value(self.store, key, list[_Reply])
                return replies if len(replies) == len(self.identities) else []
        return []

    def _replies(self, known: Sequence[_Reply]) -> list[_Reply]:
        """Return the reply of each rank; read it again if it is missing, or if the rank was not waiting."""
        replies = list(known)
        for rank, reply in enumerate(known):
            if (reply is None or not reply[0]) and self.store.check([reply_key(rank)]):
                with suppress(ProcessGroupError):  # a damaged reply is ignored
                    replies[rank] = read_value(self.store, reply_key(rank), tuple[bool, str])
        return replies

    def _status_report(self, replies: Sequence[_Reply]) -> StatusReport:
        missing, last_seen, lost = list[int](), list[str](), list[RankIdentity]()
        for each, reply in zip(self.identities, replies, strict=True):
            if reply is None:
                lost.append(each)
            if each != self.own:
                waits, line = (False, f"{each} does not answer") if reply is None else reply
                last_seen.append(line)
                missing += [] if waits else [each.global_rank]
        return StatusReport(tuple(missing), tuple(last_seen), tuple(lost))

    @property
    def _each_rank_s(self) -> float:
        """How long a request for each rank may take."""
        return len(self.identities) * _REQUEST_OF_A_RANK_S


def _call_checked(request: Callable[[], T], limit_s: float) -> list[T]:
    """Call `call_store`, but raise the error of a value that no rank has written."""
    forged = list[PeerAuthenticationError]()

    def checked() -> T:
        try:
            return request()
        except PeerAuthenticationError as error:
            forged.append(error)
            raise

    found = call_store(checked, limit_s)
    if forged:
        raise forged[0]
    return found


def publish_failure(store: dist.Store, record: bytes, world_size: int) -> None:
    """Publish a failure to all ranks of a job, unless one is published or all ranks are done."""
    if store.compare_set(FAILURE, "", record.decode()) == record:
        send_message(store, range(world_size), _KIND)


def published_failure(store: dist.Store) -> bytes | None:
    """Return the record of the rank that failed first; None where none has."""
    outcome = _outcome(store)
    return None if outcome in (b"", _ALL_DONE) else outcome


def _outcome(store: dist.Store) -> bytes:
    """Return the first failure's record, or `_ALL_DONE`, or nothing as long as there is neither."""
    return bytes(store.get(FAILURE)) if store.check([FAILURE]) else b""


def _wait_until_read(store: dist.Store, ranks: Iterable[int]) -> None:
    """Wait a little until ranks have read a failure: they cannot once the store's host has ended."""
    keys = [read_key(rank) for rank in ranks]
    if published_failure(store) is not None:
        poll_until(lambda: store.check(keys), _READ_TIMEOUT)


def resolve_cause(
    error: BaseException, ranks: RankInfo, failure_exchange: FailureExchange | None
) -> tuple[BaseException, FailureRecord]:
    """Return this rank's exception and its record; on several nodes both may be another rank's.

    A failure of this rank's own is published to the other nodes. For a consequence of another rank's failure
    that failure is looked up. After a timeout the record has where the other ranks are.
    """
    if isinstance(error, RemoteFailure):
        return _as_local(error.record, ranks)
    record = FailureRecord.of_exception(ranks, error)
    if not isinstance(error, Exception):
        return error, record
    if record.is_timeout and (path := write_flight_record(ranks.global_rank)):
        note = f"the flight record of global_rank={ranks.global_rank} is {path}"
        record = dataclasses.replace(record, notes=(note,))
    if failure_exchange is None or (ranks.is_one_node and not record.is_timeout):
        return error, record
    if record.is_consequence or record.is_timeout:
        return _look_up(error, record, ranks, failure_exchange)
    failure_exchange.publish(record.to_json())
    return error, record


def _look_up(
    error: Exception, record: FailureRecord, ranks: RankInfo, failure_exchange: FailureExchange
) -> tuple[BaseException, FailureRecord]:
    cause = failure_exchange.find_cause(error, is_timeout=record.is_timeout)
    if isinstance(cause, StatusReport):
        if not record.is_timeout:
            return error, record
        record = dataclasses.replace(record, missing=cause.missing, last_seen=cause.last_seen)
        return record.to_error(failure_exchange.began_s, (), ()), record
    if is_of_user_code(error):
        _log.warning("%s: a consequence of what ended the job.", record.line())  # the cause is raised instead
    if isinstance(cause, NodesLostError | PeerAuthenticationError):
        return cause, FailureRecord.of_exception(ranks, cause)
    return _as_local(cause, ranks, record)


def _as_local(cause: bytes, ranks: RankInfo, *others: FailureRecord) -> tuple[BaseException, FailureRecord]:
    try:
        found = FailureRecord.from_json(cause)
    except ProcessGroupError as damage:
        return damage, FailureRecord.of_exception(ranks, damage)
    first = dataclasses.replace(found, at_s=time.monotonic())  # each node has a clock of its own
    return first.to_error(time.monotonic(), (), others), first


@final
@dataclass(eq=False)
class CrossNodeFailures:
    """Publish the failures of this node's ranks that the ranks could not publish themselves.

    The ranks were killed, called `os._exit`, or failed before they had met the other nodes.
    """

    endpoint: RendezvousEndpoint | None  # None for a job on one node, which publishes nothing
    ranks: RankInfo  # of this node's first process
    job: int = 1  # its number, as in the worker contexts
    _thread: threading.Thread | None = field(default=None, init=False)

    def publish(self, record: FailureRecord) -> None:
        """Publish a record, if its rank could not, in a thread: the store may be out of reach."""
        is_ours = record.node_rank == self.ranks.node_rank
        is_cause = not (record.is_consequence or record.is_timeout)
        is_unpublished = record.exit_status is not None or not record.has_met
        endpoint = self.endpoint
        if endpoint is None or self._thread is not None or not (is_ours and is_cause and is_unpublished):
            return

        def publish() -> None:
            with suppress(*OUT_OF_REACH):
                publish_failure(self._store(endpoint), record.to_json(), self.ranks.world_size)

        self._thread = threading.Thread(target=publish, name="rankwise-publish-failure", daemon=True)
        self._thread.start()

    def wait_until_published(self) -> None:
        """Wait a little until a failure is published; and read, where this process hosts the store."""
        if self._thread is not None:
            self._thread.join(_CONNECT_TIMEOUT.total_seconds())
        if (endpoint := self.endpoint) is not None and endpoint.hosts:
            with suppress(*OUT_OF_REACH):
                store = self._store(endpoint)
                if (record := published_failure(store)) is not None:
                    nodes = {self.ranks.node_rank, FailureRecord.from_json(record).node_rank}
                    ranks, size = range(self.ranks.world_size), self.ranks.local_world_size
                    _wait_until_read(store, [rank for rank in ranks if rank // size not in nodes])

    def forget_store_soon(self, is_in_job: Callable[[], bool]) -> None:
        """Drop the store where this process hosts it and is still in its job then; a wait in it ends so.

        Such a wait is in C++ and runs no signal handler. The ranks of other nodes have a second to read the
        failure.
        """
        if self.endpoint is None or not self.endpoint.hosts:
            return
        address = self.endpoint.address

        def forget() -> None:
            self.wait_until_published()
            if is_in_job():
                forget_store(address)

        timer = threading.Timer(_LEAVE_S, forget)
        timer.daemon = True
        timer.start()

    def _store(self, endpoint: RendezvousEndpoint) -> dist.Store:
        address = endpoint.address
        store = hosted_here(address) if endpoint.hosts else open_another(address, _CONNECT_TIMEOUT)
        return store_of_job(store, self.job, key=job_key_of_environment())

"""Exchange of failures and status between ranks that no supervisor sees together."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.errors import NodesLostError, PeerAuthenticationError
from rankwise.failures import exchange
from rankwise.failures.exchange import (
    FailureExchange,
    StatusReport,
    collector_key,
    own_status,
    publish_failure,
    published_failure,
    reply_key,
    reply_to_status_queries,
    report_key,
)
from rankwise.monitoring.heartbeat import (
    NO_FILE,
    blocked_in,
    heartbeat_written_to,
    own_heartbeat,
    report_phase,
)
from rankwise.monitoring.rank_monitor import PollingMonitor, message_key
from rankwise.stores.rendezvous import FAILURE, RankIdentity, RemoteFailure, read_key
from rankwise.stores.sealed import SealedStore

RANKS = [RankIdentity(rank, rank % 2, rank // 2, 4, "ab"[rank // 2], 100 + rank) for rank in range(4)]
LOST_PEER = RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give threads on a loaded machine enough time: a store that is gone raises at once."""
    monkeypatch.setattr(exchange, "_REQUESTS_S", 60.0)


class Gone:
    """A store whose node is gone."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("Connection reset by peer")


def gone() -> Any:
    return Gone()


@pytest.fixture
def store() -> dist.Store:
    """Return the store of a job, in which all ranks are to be found."""
    return dist.HashStore()


@contextmanager
def monitored(
    store: dist.Store,
    own: RankIdentity,
    exchange: FailureExchange | None = None,
    *,
    shows_stacks: bool = False,
) -> Iterator[None]:
    """Reply as a rank in the block, and receive failures."""
    monitor = PollingMonitor(own.global_rank, len(RANKS), store, lambda: store)
    reply_to_status_queries(monitor, own, shows_stacks=shows_stacks)
    if exchange is not None:
        exchange.subscribe(monitor, lambda record: None)
    yield
    monitor.close()


def test_the_first_failure_is_found(store: dist.Store) -> None:
    """A rank that fails in consequence finds the record that was published first."""
    FailureExchange(store, RANKS, RANKS[3]).publish(b"the first")
    FailureExchange(store, RANKS, RANKS[2]).publish(b"the second")
    assert FailureExchange(store, RANKS, RANKS[0]).find_cause(LOST_PEER) == b"the first"


def test_ranks_that_do_not_reply_are_named(store: dist.Store) -> None:
    """Without a published failure the ranks that do not reply are lost; the error has their hosts."""
    for rank in (1, 3):
        store.set(reply_key(rank), own_status(RANKS[rank]))
    with pytest.raises(NodesLostError, match=r"global_rank 2 \(node 1, host 'b'") as caught:
        raise FailureExchange(store, RANKS, RANKS[0]).find_cause(LOST_PEER)  # type: ignore[misc]  # an exception here
    assert len(caught.value.lost) == 1
    assert "closed by peer" in str(caught.value)


def test_a_rank_that_is_done_waits_for_the_others(store: dist.Store) -> None:
    """All ranks go on together once the last one is done."""
    order: list[int] = []

    def finish(rank: int) -> object:
        time.sleep(0.1 * rank)
        order.append(rank)
        FailureExchange(store, RANKS, RANKS[rank]).wait_for_other_ranks()
        return sorted(order)

    with ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(finish, range(4))) == [[0, 1, 2, 3]] * 4


def test_a_rank_that_is_done_receives_a_later_failure(store: dist.Store) -> None:
    """A rank that waits for the others gets the record of one that failed after it was done."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(FailureExchange(store, RANKS, RANKS[0]).wait_for_other_ranks)
        FailureExchange(store, RANKS, RANKS[3]).publish(b"the first")
        with pytest.raises(RemoteFailure) as caught:
            waiting.result(timeout=30)
    assert caught.value.record == b"the first"


def test_a_rank_that_is_done_waits_with_a_limit(store: dist.Store) -> None:
    """Ranks that are neither done nor failed are lost after it, but for those that reply: they work on."""
    own = FailureExchange(store, RANKS, RANKS[0])
    with pytest.raises(NodesLostError) as caught:
        own.wait_for_other_ranks(timedelta(seconds=0.2))
    assert caught.value.lost == tuple(str(place) for place in RANKS[1:])
    for place in RANKS[1:]:
        store.set(reply_key(place.global_rank), own_status(place))
    own.wait_for_other_ranks(timedelta(seconds=0.2))


def test_a_store_that_is_gone_means_the_other_node() -> None:
    """Node 0 hosts the store: if it does not answer, each side has lost the other."""
    for mine, others in ((RANKS[2], RANKS[:2]), (RANKS[0], RANKS[2:])):
        found = FailureExchange(gone(), RANKS, mine).find_cause(LOST_PEER)
        assert isinstance(found, NodesLostError)
        FailureExchange(gone(), RANKS, mine).wait_for_other_ranks()
        assert found.lost == tuple(str(place) for place in others)


@pytest.mark.parametrize("was_asked", [False, True], ids=["at_once", "after_a_report"])
def test_a_failure_is_sent_to_every_rank(was_asked: bool, store: dist.Store) -> None:
    """A rank in no collective receives the failure, and keeps it when the store is gone."""
    exchange = FailureExchange(store, RANKS, RANKS[2])
    with monitored(store, RANKS[2], exchange):
        if was_asked:
            answer = FailureExchange(store, RANKS, RANKS[1]).find_cause(LOST_PEER)
            assert isinstance(answer, NodesLostError)
        FailureExchange(store, RANKS, RANKS[0]).publish(b"the first")
        store.wait([read_key(2)], timedelta(seconds=30))
    exchange.store = gone()
    assert exchange.find_cause(LOST_PEER) == b"the first"
    with pytest.raises(RemoteFailure):
        exchange.wait_for_other_ranks()


def test_the_host_of_the_store_waits_until_a_failure_is_read(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store
) -> None:
    """It waits for ranks that have not read it, but with a limit; not at all without a failure."""
    monkeypatch.setattr(exchange, "_READ_TIMEOUT", timedelta(minutes=1))
    host = FailureExchange(store, RANKS[:2], RANKS[0])
    began = time.monotonic()
    host.wait_until_read()
    publish_failure(store, b"the first", 0)
    store.set(read_key(1), "")
    host.wait_until_read()
    assert time.monotonic() - began < 30
    monkeypatch.setattr(exchange, "_READ_TIMEOUT", timedelta(seconds=0.5))
    began = time.monotonic()
    FailureExchange(store, RANKS[:3], RANKS[0]).wait_until_read()
    assert 0.5 < time.monotonic() - began < 30


def test_a_job_that_is_done_does_not_fail_any_more(store: dist.Store) -> None:
    """A failure after all ranks are done is sent to no rank."""
    FailureExchange(store, RANKS[:1], RANKS[0]).wait_for_other_ranks()
    publish_failure(store, b"too late", 1)
    assert published_failure(store) is None
    assert not store.check([message_key(0, 1)])


def test_a_late_rank_replies_with_its_phase(store: dist.Store) -> None:
    """After a timeout the ranks reply: one that does not wait is missing, with its phase."""
    with heartbeat_written_to(NO_FILE):
        report_phase("data loading", step=7)
        with monitored(store, RANKS[1]):
            found = FailureExchange(store, RANKS[:2], RANKS[0]).find_cause(LOST_PEER, is_timeout=True)
    place = "global_rank 1 (node 0, host 'a', pid 101)"
    assert found == StatusReport((1,), (f"{place} was last in step 7, data loading, 0 s ago",), ())


def test_a_rank_that_waits_too_is_not_missing(store: dist.Store) -> None:
    """A rank that waits in a collective itself is not missing; one that does not reply is."""
    with heartbeat_written_to(NO_FILE):
        report_phase("backward", step=7, waits=True)
        store.set(reply_key(1), own_status(RANKS[1]))
    store.set(reply_key(3), own_status(RANKS[3]))
    report = FailureExchange(store, RANKS, RANKS[0]).find_cause(LOST_PEER, is_timeout=True)
    assert isinstance(report, StatusReport)
    assert (report.missing, report.lost) == ((2, 3), (RANKS[2],))
    assert report.last_seen[1] == f"{RANKS[2]} does not answer"


TIMED_OUT = "a collective timed out"


def test_the_first_rank_that_times_out_collects_the_replies(store: dist.Store) -> None:
    """The others use what it has read, but for ranks that did not reply, or did not wait, by then."""
    with heartbeat_written_to(NO_FILE):
        report_phase("backward", step=7, waits=True)
        store.set(reply_key(3), own_status(RANKS[3]))
        FailureExchange(store, RANKS, RANKS[0]).find_cause(TimeoutError(), is_timeout=True)
        store.delete_key(reply_key(3))
        report_phase("data loading", step=8)
        store.set(reply_key(2), own_status(RANKS[2]))
    report = FailureExchange(store, RANKS, RANKS[1]).find_cause(TimeoutError(), is_timeout=True)
    assert isinstance(report, StatusReport)
    assert (report.missing, report.lost) == ((2,), ())
    assert [line.partition(" was last in ")[2].rpartition(",")[0] for line in report.last_seen] == [
        "step 7, backward",
        "step 8, data loading",
        "step 7, backward",
    ]


@pytest.mark.parametrize("report", [None, "[]", "damaged"], ids=["none", "of no rank", "damaged"])
def test_without_the_collected_replies_a_rank_reads_them(
    report: str | None, monkeypatch: pytest.MonkeyPatch, store: dist.Store
) -> None:
    """The rank that began to collect them may have ended."""
    monkeypatch.setattr(exchange, "_COLLECT_S", 0.1)
    store.set(collector_key(TIMED_OUT), "3")
    store.set(reply_key(1), own_status(RANKS[1]))
    if report is not None:
        store.set(report_key(TIMED_OUT), report)
    found = FailureExchange(store, RANKS[:2], RANKS[0]).find_cause(LOST_PEER, is_timeout=True)
    assert found == StatusReport((1,), (f"{RANKS[1]} is there",), ())


def test_a_rank_that_has_timed_out_too_is_not_missing(store: dist.Store) -> None:
    """Its status at its own timeout counts, also in a collective without a phase, not a later one."""
    with heartbeat_written_to(NO_FILE):
        report_phase("running")
        FailureExchange(store, RANKS[:2], RANKS[1]).find_cause(RuntimeError(), is_timeout=True)
        report_phase("teardown")
        with monitored(store, RANKS[1]):
            report = FailureExchange(store, RANKS[:2], RANKS[0]).find_cause(LOST_PEER, is_timeout=True)
    assert report == StatusReport((), (f"{RANKS[1]} was last in running, 0 s ago",), ())


def test_a_collective_that_failed_is_where_a_rank_was() -> None:
    """After a RuntimeError a rank is still in the collective's phase; after any other error it is not."""
    with heartbeat_written_to(NO_FILE):
        for error, seen in ((ValueError(), ("running", False)), (RuntimeError(), ("barrier", True))):
            report_phase("running")
            with pytest.raises(type(error)), blocked_in("barrier"):
                raise error
            heartbeat = own_heartbeat()
            assert heartbeat is not None
            assert (heartbeat.phase, heartbeat.waits) == seen


def test_stacks_are_shown_on_request(capfd: pytest.CaptureFixture[str], store: dist.Store) -> None:
    """A timeout elsewhere makes a rank without a supervisor write its stacks; closing it does not."""
    with monitored(store, RANKS[1], shows_stacks=True):
        FailureExchange(store, RANKS[:2], RANKS[0]).find_cause(LOST_PEER, is_timeout=True)
    assert f"a collective timed out; stacks of {RANKS[1]}" in (text := capfd.readouterr().err)
    assert "test_stacks_are_shown_on_request" in text
    with monitored(dist.HashStore(), RANKS[2], shows_stacks=True):
        pass
    assert capfd.readouterr().err == ""


def test_a_failure_that_no_rank_has_written() -> None:
    """A rank that is done, or looks for a cause, finds that out; it does not take it for anything else."""
    base: Any = dist.HashStore()
    store = SealedStore(base, b"key")
    found = FailureExchange(store, RANKS, RANKS[0])
    for forged in (b"all are done", b"{}"):
        base.set(FAILURE, forged)
        with pytest.raises(PeerAuthenticationError, match="No rank of the job has written"):
            found.wait_for_other_ranks()
        assert isinstance(found.find_cause(LOST_PEER), PeerAuthenticationError)

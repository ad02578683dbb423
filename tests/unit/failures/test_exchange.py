"""What ranks of several nodes hear of each other when a job fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.errors import NodesLostError
from rankwise.failures import exchange
from rankwise.failures.exchange import FailureExchange, StatusReport, publish_failure, published_failure
from rankwise.monitoring.heartbeat import (
    NO_FILE,
    blocked_in,
    heartbeat_written_to,
    own_heartbeat,
    report_phase,
)
from rankwise.monitoring.rank_monitor import StatusListener, StatusReply, reply_key
from rankwise.stores.rendezvous import RankIdentity, read_key

PLACES = [RankIdentity(rank, rank % 2, rank // 2, 4, "ab"[rank // 2], 100 + rank) for rank in range(4)]
ECHO = RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread of a loaded machine take its time: a store that is gone says so at once."""
    monkeypatch.setattr(exchange, "_LIMIT_S", 60.0)


class Gone:
    """A store that is with a node which is not there any more."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("Connection reset by peer")


def gone() -> Any:
    return Gone()


def listener(
    store: dist.Store,
    mine: RankIdentity,
    heard: Callable[[bytes], None] = lambda record: None,
    *,
    shows_stacks: bool = False,
) -> StatusListener:
    """Return a rank's part; not started."""
    return StatusListener(store, lambda: store, mine, on_failure=heard, shows_stacks=shows_stacks)


def test_the_first_failure_is_heard() -> None:
    """A rank that feels a failure hears the record that the first one left, and no later one."""
    store = dist.HashStore()
    FailureExchange(store, PLACES, PLACES[3]).say(b"the first")
    FailureExchange(store, PLACES, PLACES[2]).say(b"the second")
    assert FailureExchange(store, PLACES, PLACES[0]).hear(ECHO) == b"the first"


def test_who_does_not_answer_is_named() -> None:
    """Where nobody says that it failed, those that do not answer the roll are lost, with their hosts."""
    store = dist.HashStore()
    for rank in (1, 3):
        store.set(f"still/{rank}", StatusReply.of_this_rank(PLACES[rank]))
    with pytest.raises(NodesLostError, match=r"global_rank 2 \(node 1, host 'b'") as caught:
        raise FailureExchange(store, PLACES, PLACES[0]).hear(ECHO)  # type: ignore[misc]  # an exception here
    assert len(caught.value.lost) == 1
    assert "closed by peer" in str(caught.value)


def test_who_is_done_waits_for_the_others() -> None:
    """All ranks leave together once the last is done, and none has anything to say then."""
    store = dist.HashStore()
    order: list[int] = []

    def finish(rank: int) -> object:
        time.sleep(0.1 * rank)
        order.append(rank)
        heard = FailureExchange(store, PLACES, PLACES[rank]).wait_for_other_ranks()
        assert sorted(order) == [0, 1, 2, 3]
        return heard

    with ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(finish, range(4))) == [None] * 4


def test_who_is_done_hears_of_a_later_failure() -> None:
    """A rank that waits for the others gets the record of one that failed after it was done."""
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(FailureExchange(store, PLACES, PLACES[0]).wait_for_other_ranks)
        FailureExchange(store, PLACES, PLACES[3]).say(b"the first")
        assert waiting.result(timeout=30) == b"the first"


def test_who_is_done_does_not_wait_for_ever() -> None:
    """Ranks that are neither done nor failed, nor answer, are lost at the end of this one's patience."""
    heard = FailureExchange(dist.HashStore(), PLACES, PLACES[0]).wait_for_other_ranks(timedelta(seconds=0.2))
    assert isinstance(heard, NodesLostError)
    assert heard.lost == tuple(str(place) for place in PLACES[1:])


def test_who_is_done_leaves_those_alone_that_work_on() -> None:
    """A rank that answers is at work, and no failure."""
    store = dist.HashStore()
    for place in PLACES[1:]:
        store.set(reply_key(place.global_rank), StatusReply.of_this_rank(place))
    assert FailureExchange(store, PLACES, PLACES[0]).wait_for_other_ranks(timedelta(seconds=0.2)) is None


def test_a_store_that_is_gone_means_the_other_node() -> None:
    """The store is with node 0: if it does not answer, each side misses the other."""
    for mine, others in ((PLACES[2], PLACES[:2]), (PLACES[0], PLACES[2:])):
        heard = FailureExchange(gone(), PLACES, mine).hear(ECHO)
        assert isinstance(heard, NodesLostError)
        assert FailureExchange(gone(), PLACES, mine).wait_for_other_ranks() is None
        assert heard.lost == tuple(str(place) for place in others)


@pytest.mark.parametrize("was_asked", [False, True], ids=["at_once", "after_a_roll"])
def test_a_failure_wakes_every_rank(was_asked: bool) -> None:
    """A rank that is in no collective hears what was left, and knows it when the store is gone."""
    store = dist.HashStore()
    words = FailureExchange(store, PLACES, PLACES[2])
    ear = listener(store, PLACES[2], words.note)
    ear.start()
    if was_asked:
        assert isinstance(FailureExchange(store, PLACES, PLACES[1]).hear(ECHO), NodesLostError)
    FailureExchange(store, PLACES, PLACES[0]).say(b"the first")
    store.wait([read_key(2)], timedelta(seconds=30))
    ear.close()
    words._store = gone()
    assert words.hear(ECHO) == words.wait_for_other_ranks() == b"the first"


def test_who_has_the_store_stays_until_the_others_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for who has not, but not for ever; and not at all where nothing has failed."""
    monkeypatch.setattr(exchange, "_LINGER_S", 60.0)
    store = dist.HashStore()
    host = FailureExchange(store, PLACES[:2], PLACES[0])
    began = time.monotonic()
    host.wait_until_read()
    publish_failure(store, b"the first", 0)
    store.set(read_key(1), "")
    host.wait_until_read()
    assert time.monotonic() - began < 30
    monkeypatch.setattr(exchange, "_LINGER_S", 0.5)
    began = time.monotonic()
    FailureExchange(store, PLACES[:3], PLACES[0]).wait_until_read()
    assert 0.5 < time.monotonic() - began < 30


def test_a_job_that_is_done_does_not_fail_any_more() -> None:
    """What ends after all ranks are done wakes nobody."""
    store = dist.HashStore()
    assert FailureExchange(store, PLACES[:1], PLACES[0]).wait_for_other_ranks() is None
    publish_failure(store, b"too late", 1)
    assert published_failure(store) is None
    assert not store.check(["where/0"])


def test_a_rank_that_is_late_says_where_it_is() -> None:
    """After a timeout the ranks that are there answer: who does not wait is missing; where, and how long."""
    store = dist.HashStore()
    late = listener(store, PLACES[1])
    with heartbeat_written_to(NO_FILE):
        report_phase("data loading", step=7)
        late.start()
        heard = FailureExchange(store, PLACES[:2], PLACES[0]).hear(ECHO, is_timeout=True)
        late.close()
    place = "global_rank 1 (node 0, host 'a', pid 101)"
    assert heard == StatusReport((1,), (f"{place} was last in step 7, data loading, 0 s ago",), ())


def test_a_rank_that_waits_too_is_not_missing() -> None:
    """Who waits in a collective itself holds nobody up; who does not answer does."""
    store = dist.HashStore()
    with heartbeat_written_to(NO_FILE):
        report_phase("backward", step=7, waits=True)
        store.set("still/1", StatusReply.of_this_rank(PLACES[1]))
    store.set("still/3", StatusReply.of_this_rank(PLACES[3]))
    roll = FailureExchange(store, PLACES, PLACES[0]).hear(ECHO, is_timeout=True)
    assert isinstance(roll, StatusReport)
    assert (roll.missing, roll.lost) == ((2, 3), (PLACES[2],))
    assert roll.last_seen[1] == f"{PLACES[2]} does not answer"


def test_a_rank_that_has_given_up_too_is_not_missing() -> None:
    """Its own status counts, also in a collective without a phase, not what it is asked later."""
    store = dist.HashStore()
    asked = listener(store, PLACES[1])
    with heartbeat_written_to(NO_FILE):
        report_phase("running")
        FailureExchange(store, PLACES[:2], PLACES[1]).hear(RuntimeError(), is_timeout=True)
        report_phase("teardown")
        asked.start()
        roll = FailureExchange(store, PLACES[:2], PLACES[0]).hear(ECHO, is_timeout=True)
        asked.close()
    assert roll == StatusReport((), (f"{PLACES[1]} was last in running, 0 s ago",), ())


def test_a_collective_that_failed_is_where_a_rank_was() -> None:
    """Ranks that time out together see each other in the collective still; any other error ends it."""
    with heartbeat_written_to(NO_FILE):
        for error, seen in ((ValueError(), ("running", False)), (RuntimeError(), ("barrier", True))):
            report_phase("running")
            with pytest.raises(type(error)), blocked_in("barrier"):
                raise error
            heartbeat = own_heartbeat()
            assert heartbeat is not None
            assert (heartbeat.phase, heartbeat.waits) == seen


def test_stacks_are_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    """A timeout elsewhere makes a rank that no supervisor sees write its stacks; closing it does not."""
    store = dist.HashStore()
    asked = listener(store, PLACES[1], shows_stacks=True)
    asked.start()
    FailureExchange(store, PLACES[:2], PLACES[0]).hear(ECHO, is_timeout=True)
    asked.close()
    assert f"a collective timed out; stacks of {PLACES[1]}" in (text := capfd.readouterr().err)
    assert "test_stacks_are_shown_on_request" in text
    closed = listener(store, PLACES[2], shows_stacks=True)
    closed.start()
    closed.close()
    assert capfd.readouterr().err == ""

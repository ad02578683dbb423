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
from rankwise.process_group import last_words
from rankwise.process_group.last_words import LastWords, Roll, leave_word, what_was_left
from rankwise.process_group.meeting import Place, heard_key
from rankwise.process_group.pulse import NO_FILE, beat, own_pulse, pulse_written_to, waiting_in
from rankwise.process_group.whereabouts import Answer, Whereabouts, answer_key

PLACES = [Place(rank, rank % 2, rank // 2, 4, "ab"[rank // 2], 100 + rank) for rank in range(4)]
ECHO = RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread of a loaded machine take its time: a store that is gone says so at once."""
    monkeypatch.setattr(last_words, "_LIMIT_S", 60.0)


class Gone:
    """A store that is with a node which is not there any more."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("Connection reset by peer")


def gone() -> Any:
    return Gone()


def listener(
    store: dist.Store,
    mine: Place,
    heard: Callable[[bytes], None] = lambda record: None,
    *,
    shows_stacks: bool = False,
) -> Whereabouts:
    """Return a rank's part; not started."""
    return Whereabouts(store, lambda: store, mine, on_failure=heard, shows_stacks=shows_stacks)


def test_the_first_failure_is_heard() -> None:
    """A rank that feels a failure hears the record that the first one left, and no later one."""
    store = dist.HashStore()
    LastWords(store, PLACES, PLACES[3]).say(b"the first")
    LastWords(store, PLACES, PLACES[2]).say(b"the second")
    assert LastWords(store, PLACES, PLACES[0]).hear(ECHO) == b"the first"


def test_who_does_not_answer_is_named() -> None:
    """Where nobody says that it failed, those that do not answer the roll are lost, with their hosts."""
    store = dist.HashStore()
    for rank in (1, 3):
        store.set(f"still/{rank}", Answer.of_this_rank(PLACES[rank]))
    with pytest.raises(NodesLostError, match=r"global_rank 2 \(node 1, host 'b'") as caught:
        raise LastWords(store, PLACES, PLACES[0]).hear(ECHO)  # type: ignore[misc]  # an exception here
    assert len(caught.value.lost) == 1
    assert "closed by peer" in str(caught.value)


def test_who_is_done_waits_for_the_others() -> None:
    """All ranks leave together once the last is done, and none has anything to say then."""
    store = dist.HashStore()
    order: list[int] = []

    def finish(rank: int) -> object:
        time.sleep(0.1 * rank)
        order.append(rank)
        heard = LastWords(store, PLACES, PLACES[rank]).wait_for_the_others()
        assert sorted(order) == [0, 1, 2, 3]
        return heard

    with ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(finish, range(4))) == [None] * 4


def test_who_is_done_hears_of_a_later_failure() -> None:
    """A rank that waits for the others gets the record of one that failed after it was done."""
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(LastWords(store, PLACES, PLACES[0]).wait_for_the_others)
        LastWords(store, PLACES, PLACES[3]).say(b"the first")
        assert waiting.result(timeout=30) == b"the first"


def test_who_is_done_does_not_wait_for_ever() -> None:
    """Ranks that are neither done nor failed, nor answer, are lost at the end of this one's patience."""
    heard = LastWords(dist.HashStore(), PLACES, PLACES[0]).wait_for_the_others(timedelta(seconds=0.2))
    assert isinstance(heard, NodesLostError)
    assert heard.lost == tuple(str(place) for place in PLACES[1:])


def test_who_is_done_leaves_those_alone_that_work_on() -> None:
    """A rank that answers is at work, and no failure."""
    store = dist.HashStore()
    for place in PLACES[1:]:
        store.set(answer_key(place.global_rank), Answer.of_this_rank(place))
    assert LastWords(store, PLACES, PLACES[0]).wait_for_the_others(timedelta(seconds=0.2)) is None


def test_a_store_that_is_gone_means_the_other_node() -> None:
    """The store is with node 0: if it does not answer, each side misses the other."""
    for mine, others in ((PLACES[2], PLACES[:2]), (PLACES[0], PLACES[2:])):
        heard = LastWords(gone(), PLACES, mine).hear(ECHO)
        assert isinstance(heard, NodesLostError)
        assert LastWords(gone(), PLACES, mine).wait_for_the_others() is None
        assert heard.lost == tuple(str(place) for place in others)


@pytest.mark.parametrize("was_asked", [False, True], ids=["at_once", "after_a_roll"])
def test_a_failure_wakes_every_rank(was_asked: bool) -> None:
    """A rank that is in no collective hears what was left, and knows it when the store is gone."""
    store = dist.HashStore()
    words = LastWords(store, PLACES, PLACES[2])
    ear = listener(store, PLACES[2], words.note)
    ear.start()
    if was_asked:
        assert isinstance(LastWords(store, PLACES, PLACES[1]).hear(ECHO), NodesLostError)
    LastWords(store, PLACES, PLACES[0]).say(b"the first")
    store.wait([heard_key(2)], timedelta(seconds=30))
    ear.close()
    words._store = gone()
    assert words.hear(ECHO) == words.wait_for_the_others() == b"the first"


def test_who_has_the_store_stays_until_the_others_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for who has not, but not for ever; and not at all where nothing has failed."""
    monkeypatch.setattr(last_words, "_LINGER_S", 60.0)
    store = dist.HashStore()
    host = LastWords(store, PLACES[:2], PLACES[0])
    began = time.monotonic()
    host.wait_until_heard()
    leave_word(store, b"the first", 0)
    store.set(heard_key(1), "")
    host.wait_until_heard()
    assert time.monotonic() - began < 30
    monkeypatch.setattr(last_words, "_LINGER_S", 0.5)
    began = time.monotonic()
    LastWords(store, PLACES[:3], PLACES[0]).wait_until_heard()
    assert 0.5 < time.monotonic() - began < 30


def test_a_job_that_is_done_does_not_fail_any_more() -> None:
    """What ends after all ranks are done wakes nobody."""
    store = dist.HashStore()
    assert LastWords(store, PLACES[:1], PLACES[0]).wait_for_the_others() is None
    leave_word(store, b"too late", 1)
    assert what_was_left(store) is None
    assert not store.check(["where/0"])


def test_a_rank_that_is_late_says_where_it_is() -> None:
    """After a timeout the ranks that are there answer: who does not wait is missing; where, and how long."""
    store = dist.HashStore()
    late = listener(store, PLACES[1])
    with pulse_written_to(NO_FILE):
        beat("data loading", step=7)
        late.start()
        heard = LastWords(store, PLACES[:2], PLACES[0]).hear(ECHO, is_timeout=True)
        late.close()
    place = "global_rank 1 (node 0, host 'a', pid 101)"
    assert heard == Roll((1,), (f"{place} was last in step 7, data loading, 0 s ago",), ())


def test_a_rank_that_waits_too_is_not_missing() -> None:
    """Who waits in a collective itself holds nobody up; who does not answer does."""
    store = dist.HashStore()
    with pulse_written_to(NO_FILE):
        beat("backward", step=7, waits=True)
        store.set("still/1", Answer.of_this_rank(PLACES[1]))
    store.set("still/3", Answer.of_this_rank(PLACES[3]))
    roll = LastWords(store, PLACES, PLACES[0]).hear(ECHO, is_timeout=True)
    assert isinstance(roll, Roll)
    assert (roll.missing, roll.lost) == ((2, 3), (PLACES[2],))
    assert roll.last_seen[1] == f"{PLACES[2]} does not answer"


def test_a_rank_that_has_given_up_too_is_not_missing() -> None:
    """Its own word counts, be it in a collective that has no pulse, and not what it is asked to say later."""
    store = dist.HashStore()
    asked = listener(store, PLACES[1])
    with pulse_written_to(NO_FILE):
        beat("running")
        LastWords(store, PLACES[:2], PLACES[1]).hear(RuntimeError(), is_timeout=True)
        beat("teardown")
        asked.start()
        roll = LastWords(store, PLACES[:2], PLACES[0]).hear(ECHO, is_timeout=True)
        asked.close()
    assert roll == Roll((), (f"{PLACES[1]} was last in running, 0 s ago",), ())


def test_a_collective_that_failed_is_where_a_rank_was() -> None:
    """Ranks that time out together see each other in the collective still; any other error ends it."""
    with pulse_written_to(NO_FILE):
        for error, seen in ((ValueError(), ("running", False)), (RuntimeError(), ("barrier", True))):
            beat("running")
            with pytest.raises(type(error)), waiting_in("barrier"):
                raise error
            pulse = own_pulse()
            assert pulse is not None
            assert (pulse.phase, pulse.waits) == seen


def test_stacks_are_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    """A timeout elsewhere makes a rank that no supervisor sees write its stacks; closing it does not."""
    store = dist.HashStore()
    asked = listener(store, PLACES[1], shows_stacks=True)
    asked.start()
    LastWords(store, PLACES[:2], PLACES[0]).hear(ECHO, is_timeout=True)
    asked.close()
    assert f"a collective timed out; stacks of {PLACES[1]}" in (text := capfd.readouterr().err)
    assert "test_stacks_are_shown_on_request" in text
    closed = listener(store, PLACES[2], shows_stacks=True)
    closed.start()
    closed.close()
    assert capfd.readouterr().err == ""

"""What ranks of several nodes hear of each other when a job fails."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rankwise.errors import NodesLostError
from rankwise.process_group.last_words import LastWords
from rankwise.process_group.meeting import Place

PLACES = [Place(rank, rank % 2, rank // 2, 4, "ab"[rank // 2], 100 + rank) for rank in range(4)]
ECHO = RuntimeError("Connection closed by peer")


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
        store.set(f"still/{rank}", "1")
    with pytest.raises(NodesLostError, match=r"global_rank 2 \(node 1, host 'b'") as caught:
        raise LastWords(store, PLACES, PLACES[0]).hear(ECHO)  # type: ignore[misc]  # an exception here
    assert len(caught.value.lost) == 1
    assert "closed by peer" in str(caught.value)


def test_a_store_that_is_gone_means_the_other_node() -> None:
    """The store is with node 0: if it does not answer, each side misses the other."""

    class Gone:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    for mine, others in ((PLACES[2], PLACES[:2]), (PLACES[0], PLACES[2:])):
        heard = LastWords(Gone(), PLACES, mine).hear(ECHO)  # type: ignore[arg-type]  # no store any more
        assert isinstance(heard, NodesLostError)
        assert heard.lost == tuple(str(place) for place in others)

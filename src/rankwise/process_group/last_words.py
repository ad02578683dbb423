"""What the ranks of several nodes tell one another through the store when a job fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from typing_extensions import final

from rankwise.errors import NodesLostError
from rankwise.process_group.meeting import Place

__all__ = ["LastWords"]

_FAILURE = "failure"
# How long the rank that failed first has to say so, once others feel it, and how long the store may take.
_PATIENCE = timedelta(seconds=0.7)
_LIMIT_S = 1.5


@final
class LastWords:
    """One rank's way to say why it ends, and to hear why it has to.

    Args:
        store: the job's own.
        places: all ranks, by global rank.
        mine: this rank's place.
    """

    def __init__(self, store: dist.Store, places: Sequence[Place], mine: Place) -> None:
        self._store = store
        self._places = places
        self._mine = mine

    def say(self, record: bytes) -> None:
        """Leave this rank's failure for the others, unless one is there already."""
        self._within_limit(lambda: self._store.compare_set(_FAILURE, "", record.decode()))

    def hear(self, error: BaseException) -> bytes | NodesLostError | None:
        """Find out why a collective failed here with `error`.

        Returns:
            The record of the rank that failed first; or which ranks are not to be heard of any more; None
            where all answer and none says that it failed.
        """
        heard: list[bytes | list[Place]] = []
        if not self._within_limit(lambda: heard.append(self._call_the_roll())):
            # The store is with node 0: from elsewhere that node is away, from there all others are.
            is_with_the_store = self._mine.node_rank == 0
            heard.append([place for place in self._places if (place.node_rank == 0) != is_with_the_store])
        [answer] = heard
        if isinstance(answer, bytes):
            return answer
        return NodesLostError(tuple(str(place) for place in answer), str(error)) if answer else None

    def _call_the_roll(self) -> bytes | list[Place]:
        self._store.set(f"still/{self._mine.global_rank}", "1")
        try:
            self._store.wait([_FAILURE], _PATIENCE)
            return bytes(self._store.get(_FAILURE))
        except dist.DistStoreError:
            return [place for place in self._places if not self._store.check([f"still/{place.global_rank}"])]

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

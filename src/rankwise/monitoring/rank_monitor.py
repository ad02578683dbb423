"""A rank's ear for those that no supervisor sees with it: it says where it is, and hears what has failed."""

from __future__ import annotations

import faulthandler
import json
import threading
from collections.abc import Callable
from typing import final

import torch.distributed as dist

from rankwise.monitoring.heartbeat import FailureTime, own_heartbeat
from rankwise.processes.stderr import write_stderr
from rankwise.stores.rendezvous import FAILURE, RankIdentity, read_key
from rankwise.stores.waiting import wait_long

__all__ = ["StatusReply", "StatusListener", "reply_key", "query_status", "notify_failure"]

_CLOSE_S = 1.0
_CLOSED, _FAILED = "closed", "failed"
_STDERR = 2


@final
class StatusReply:
    """What one rank has said of itself: which it is, whether it waits for others, and where it is."""

    def __init__(self, text: bytes) -> None:
        self.waits, self.line = json.loads(text)

    @staticmethod
    def of_this_rank(mine: RankIdentity, gave_up: FailureTime | None = None) -> str:
        """Return the text that another rank makes an answer of.

        Args:
            mine: this rank's place.
            gave_up: when this rank had waited too long itself, if it has.
        """
        heartbeat = own_heartbeat() if gave_up is None else gave_up.heartbeat
        seen = (
            "is there"
            if heartbeat is None
            else f"was last in {heartbeat.where()}, {heartbeat.seconds_ago():.0f} s ago"
        )
        waits = gave_up is not None or (heartbeat is not None and heartbeat.waits)
        return json.dumps([waits, f"{mine} {seen}"])


@final
class StatusListener:
    """This rank's part: a thread that waits in the store until somebody asks, and answers, or has failed.

    It answers once: after a roll it only waits for a failure.

    Args:
        store: the job's.
        open_listener: opens the same store once more, where a thread that waits in it would hold up the
            others; called in that thread.
        mine: this rank's place.
        on_failure: called in the thread with the record of the rank that failed first, be it this one.
        shows_stacks: whether to write this rank's stacks too, when a collective has timed out.
    """

    def __init__(
        self,
        store: dist.Store,
        open_listener: Callable[[], dist.Store],
        mine: RankIdentity,
        *,
        on_failure: Callable[[bytes], None],
        shows_stacks: bool,
    ) -> None:
        self._store = store
        self._open_listener = open_listener
        self._mine = mine
        self._on_failure = on_failure
        self._shows_stacks = shows_stacks
        self._thread = threading.Thread(target=self._listen, name="rankwise-status", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; leave it to itself where the store does not answer, as over a cable that is cut."""
        closing = threading.Thread(target=self._end_thread, name="rankwise-status-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _end_thread(self) -> None:
        try:
            for key in _questions(self._mine.global_rank):
                self._store.set(key, _CLOSED)
        except (RuntimeError, ValueError):
            return  # a store whose host is gone: the thread has left, or will
        self._thread.join(_CLOSE_S)

    def _listen(self) -> None:
        try:
            store = self._open_listener()
            for key in _questions(self._mine.global_rank):
                wait_long(store, key)
                word = store.get(key).decode()
                if word == _FAILED:
                    self._hear(store)
                if word in (_FAILED, _CLOSED):
                    return
                # Where it has given up meanwhile, that is its answer.
                store.compare_set(reply_key(self._mine.global_rank), "", StatusReply.of_this_rank(self._mine))
                self._show_stacks(word)
        except (RuntimeError, ValueError):
            return  # the store is gone

    def _hear(self, store: dist.Store) -> None:
        self._on_failure(bytes(store.get(FAILURE)))
        store.set(read_key(self._mine.global_rank), "")

    def _show_stacks(self, reason: str) -> None:
        if self._shows_stacks and reason:
            write_stderr(f"rankwise: {reason}; stacks of {self._mine}:\n")
            faulthandler.dump_traceback(_STDERR, all_threads=True)


def query_status(store: dist.Store, count: int, reason: str) -> None:
    """Ask every rank where it is; with a reason, also for its stacks."""
    for rank in range(count):
        store.set(_questions(rank)[0], reason)


def notify_failure(store: dist.Store, count: int) -> None:
    """Let every rank hear of the failure that was left, whether it has answered a roll already or not."""
    for rank in range(count):
        for key in _questions(rank):
            store.set(key, _FAILED)


def reply_key(rank: int) -> str:
    """Return where a rank's answer is."""
    return f"still/{rank}"


def _questions(rank: int) -> tuple[str, str]:
    """Return the keys in which a rank waits, one after the other."""
    return f"where/{rank}", f"then/{rank}"

"""A rank's background work, in one thread with one store client: messages of other ranks, and a timer.

A rank on the only node of a supervised job needs no thread: its messages come over the channel to the
supervisor, and the channel's thread delivers them. Any other rank polls its mailbox in the job's TCP store.
It does not wait there: see `poll_until`.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import final

import torch.distributed as dist

from rankwise.errors import RankwiseError
from rankwise.stores.private import pack_fields

# A store answers some ten thousand requests a second: each rank of a large job polls less often.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_PER_RANK_S = 0.05, 0.25, 0.00025
_CLOSE_S = 1.0

# Sends a request to the private store; the callback gets the reply, or None where none will come.
Post = Callable[[bytes, Callable[[bytes | None], None]], object]


def send_message(store: dist.Store, ranks: Iterable[int], kind: str, text: str = "") -> None:
    """Put a message into the mailboxes of some ranks, unless the same message is there already.

    `compare_set` finds the next free key, so a sender that is killed leaves no gap.
    """
    message = f"{kind}:{text}".encode()
    for rank in ranks:
        number = 1
        while store.compare_set(message_key(rank, number), "", message.decode()) != message:
            number += 1


def message_key(rank: int, number: int) -> str:
    """Return the key of a rank's message; numbers start at 1."""
    return f"mailbox/{rank}/{number}"


class RankMonitor(ABC):
    """Deliver the messages that other ranks send to this one.

    It starts with its first subscription; a job in which nobody subscribes needs no thread. `store` has the
    mailboxes; it is for other threads than the monitor's.
    """

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.store = store
        self._rank = rank
        self._next_number = 1
        self._subscribers: dict[str, Callable[[str], None]] = {}
        self._undelivered: dict[str, str] = {}
        self._lock = threading.Lock()
        self._has_started = False

    def subscribe(self, kind: str, on_message: Callable[[str], None]) -> None:
        """Call `on_message` with the text of each message of a kind, in the monitor's thread.

        If messages have arrived already, the last one is delivered at once, in the calling thread.
        """
        with self._lock:
            self._subscribers[kind] = on_message
            text = self._undelivered.pop(kind, None)
        if text is not None:
            on_message(text)
        self._start_once()

    def unsubscribe(self, kind: str) -> None:
        """Drop the messages of a kind. Runs on: any thread, finalizers too, as it waits for no lock."""
        self._subscribers.pop(kind, None)
        self._undelivered.pop(kind, None)

    @abstractmethod
    def set_once(self, key: str, value: str) -> None:
        """Set a key of the store unless it is set. Runs on: a subscriber, when it is called."""

    def close(self) -> None:
        """Deliver nothing more; idempotent."""
        with self._lock:
            self._subscribers.clear()  # they may refer to this monitor, and so to its store, in a cycle

    @abstractmethod
    def _start(self) -> None:
        """Begin to read the mailbox."""

    def _start_once(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._start()

    @property
    def _next_key(self) -> str:
        return message_key(self._rank, self._next_number)

    def _deliver(self, message: bytes) -> None:
        self._next_number += 1
        kind, _, text = message.decode(errors="replace").partition(":")
        with self._lock:
            on_message = self._subscribers.get(kind)
            if on_message is None:
                self._undelivered[kind] = text
        if on_message is not None:
            on_message(text)


@final
class PollingMonitor(RankMonitor):
    """Read the mailbox, and run a timer, in a thread with its own client of the store."""

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, open_store: Callable[[], dist.Store]
    ) -> None:
        super().__init__(rank, store)
        self._open_store = open_store  # opens another client, as calls to one wait for each other
        self._pause_s = min(max(_SHORTEST_PAUSE_S, world_size * _PAUSE_PER_RANK_S), _LONGEST_PAUSE_S)
        self._due_s, self._interval_s = math.inf, math.inf
        self._action: Callable[[dist.Store], object] = lambda store: None
        self._own_store: dist.Store | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankwise-monitor", daemon=True)

    def call_every(self, interval_s: float, action: Callable[[dist.Store], None]) -> None:
        """Call `action` with the thread's store in intervals; one action per monitor."""
        self._interval_s, self._action = interval_s, action
        self._due_s = time.monotonic() + interval_s
        self._start_once()

    @property
    def thread_store(self) -> dist.Store:
        """The client of the store that subscribers use when they are called."""
        return self.store if self._own_store is None else self._own_store

    def set_once(self, key: str, value: str) -> None:
        self.thread_store.compare_set(key, "", value)

    def close(self) -> None:
        """End the thread; abandon it where the store does not answer."""
        self._is_closed.set()
        if self._has_started:
            self._thread.join(_CLOSE_S)
        super().close()

    def _start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_closed.wait(self._pause_s):
                if self._own_store is None:
                    self._own_store = self._open_store()
                while self._own_store.check([self._next_key]):
                    self._deliver(self._own_store.get(self._next_key))
                if time.monotonic() >= self._due_s:
                    self._due_s = time.monotonic() + self._interval_s
                    self._action(self._own_store)
        except (RuntimeError, ValueError, RankwiseError):
            return  # the store's host is gone
        finally:
            self._own_store = None  # disconnects


@final
class ChannelMonitor(RankMonitor):
    """Read the mailbox in the private store by requests whose replies the channel's thread delivers."""

    def __init__(self, rank: int, store: dist.Store, prefix: str, post: Post) -> None:
        super().__init__(rank, store)
        self._prefix = prefix  # which `store` puts before its keys
        self._post = post  # over the channel
        self._is_closed = False

    def set_once(self, key: str, value: str) -> None:
        self._request(lambda reply: None, "compare_set", key, "", value)

    def close(self) -> None:
        """Let a last message end the request that waits for one."""
        if self._has_started:
            self._is_closed = True
            self.set_once(self._next_key, "closed")
        super().close()

    def _start(self) -> None:
        self._request(self._on_message, "get", self._next_key)
        if self._is_closed:  # since the last message arrived: `close` has ended the previous request
            self.set_once(self._next_key, "closed")

    def _on_message(self, message: bytes | None) -> None:
        if message is not None and not self._is_closed:
            self._deliver(message)
            self._start()

    def _request(
        self, on_reply: Callable[[bytes | None], None], operation: str, key: str, *values: str
    ) -> None:
        fields = (operation, f"{self._prefix}/{key}", *values)
        self._post(pack_fields(field.encode() for field in fields), on_reply)

"""A rank's end of its channel to the supervisor, and the frames that it transports."""

from __future__ import annotations

import itertools
import queue
import signal
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum, unique
from typing import final

from rankwise.errors import ProcessGroupError
from rankwise.processes import fork_safety
from rankwise.processes.event_loop import EventLoop
from rankwise.processes.exit_codes import write_stderr

_HEADER = struct.Struct("!IB")
_CHUNK = 1 << 16
_LONGEST = 1 << 26  # bytes in a frame; torch's own store takes 2**23. A text in place of a header names more

REQUEST_ID_SIZE = 8
"""The size in bytes of a store request's number, which precedes the request and its reply."""


@unique
class Kind(IntEnum):
    """The type of a frame."""

    HELLO = 1  # worker: the process has started; its heartbeat, if it shares no memory with the supervisor
    FAILURE = 2  # worker: a failure record, as JSON
    DONE = 3  # worker: its part of the job is finished, its value is packed
    STOP = 4  # supervisor: end the job
    OVER = 5  # supervisor: the job is over on every rank
    STORE_REQUEST = 6  # worker: a request to the private store
    STORE_REPLY = 7  # supervisor: the reply
    IN_LOOP = 8  # worker: it stops at a boundary on REQUEST ("1"), or no longer does ("0")
    REQUEST = 9  # supervisor: stop training, because of this signal (its number)
    STOPPED = 10  # worker: as DONE, but training has stopped for this signal (its number)
    ELSEWHERE = 11  # worker: a rank of another node has failed; its record, as JSON
    STORE_CANCEL = 12  # worker: it no longer waits for the reply to a request (its number)
    LEFT = 13  # worker: after a failure, the hooks that follow it have ended
    EXITED = 14  # worker: its script has ended by SystemExit; a record, for the case that others need it


_KINDS = frozenset(Kind)


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return a message as bytes: length, kind, payload; raise `ProcessGroupError` if it is too long."""
    if len(payload) > _LONGEST:
        raise ProcessGroupError(
            f"A {kind.name} message of {len(payload)} bytes is longer than {_LONGEST}.",
            "send large values through the process group: the private store is for small ones.",
        )
    return _HEADER.pack(len(payload), kind) + payload


def signal_in(payload: bytes) -> int:
    """Return the number of a signal in a payload; raise `ProcessGroupError` if it has none."""
    if not payload.isdigit() or len(payload) > 2 or not 1 <= int(payload) < signal.NSIG:
        raise _damage(f"the signal {payload[:20]!r}")
    return int(payload)


def _damage(found: str) -> ProcessGroupError:
    return ProcessGroupError(
        f"A channel between a rank and the launching process is damaged: it has {found}.",
        "look for code that writes to a descriptor which it has not opened.",
    )


@final
class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes, on_frame: Callable[[Kind, bytes], None]) -> None:
        """Add bytes; call `on_frame` with each complete frame; raise `ProcessGroupError` for other bytes."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer)
            if length > _LONGEST or kind not in _KINDS:
                raise _damage(f"a header of kind {kind} with {length} bytes")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            on_frame(Kind(kind), payload)


@final
class RankChannel:
    """Send frames to the supervisor and request from its store; receive in a thread.

    The thread also delivers signals while the main thread is blocked: see `EventLoop`. It calls `on_lost`
    when the launching process is gone.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        self._sock = sock
        sock.settimeout(None)  # whatever default the program has set
        fork_safety.close_in_child(sock)  # a process that the rank forks is not the rank
        self._on_lost = on_lost
        self._on_stop: Callable[[], None] | None = None
        self._on_request: Callable[[int], None] | None = None
        self._has_to_stop = False
        self._is_answered = True
        self._lock = threading.Lock()
        self._pending: dict[bytes, Callable[[bytes | None], None]] = {}
        self._requests = itertools.count(1)
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._reader = FrameReader()
        self._loop = EventLoop()
        self._loop.register(sock, self._receive)
        self._thread = threading.Thread(target=self._loop.run, name="rankwise-channel", daemon=True)
        self._thread.start()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send one frame; do nothing when the launching process is gone: see `on_lost`."""
        data = frame(kind, payload)
        if len(data) <= _CHUNK or threading.current_thread() is not threading.main_thread():
            self._send(data)
            return
        # A signal handler that raises in the meantime would cut the frame, and damage the following ones.
        sending = threading.Thread(target=self._send, args=(data,), name="rankwise-send", daemon=True)
        sending.start()
        sending.join()

    def _send(self, data: bytes) -> None:
        with suppress(OSError), self._lock:
            self._sock.sendall(data)

    def ask_store(self, request: bytes, timeout_s: float) -> bytes:
        """Return the private store's reply; raise `TimeoutError`, or `ConnectionError` if none will come."""
        replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        request_id = self.post_store(request, replies.put)
        try:
            reply = replies.get(timeout=timeout_s)
        except queue.Empty:
            self.send(Kind.STORE_CANCEL, request_id)
            raise TimeoutError from None
        finally:
            self._pending.pop(request_id, None)
        if reply is None:
            raise ConnectionError
        return reply

    def post_store(self, request: bytes, on_reply: Callable[[bytes | None], None]) -> bytes:
        """Send a request to the private store; return its number. Calls `on_reply` in the channel's thread.

        The reply is None when the job is stopped or its supervisor is gone.
        """
        request_id = next(self._requests).to_bytes(REQUEST_ID_SIZE, "big")
        self._pending[request_id] = on_reply
        if not self._is_answered:
            self._release_pending()
        self.send(Kind.STORE_REQUEST, request_id + request)
        return request_id

    def call_on_stop(self, on_stop: Callable[[], None] | None) -> None:
        """Call `on_stop` in another thread when the supervisor sends STOP; at once if it has."""
        self._on_stop = on_stop
        self._call_stop()

    def call_on_request(self, on_request: Callable[[int], None] | None) -> None:
        """Call `on_request` with a signal's number when this rank should stop at a boundary, if it can."""
        self._on_request = on_request
        self.send(Kind.IN_LOOP, b"0" if on_request is None else b"1")

    def is_over_within(self, seconds: float | None) -> bool:
        """Wait until the job is over on every rank; return whether it is in time."""
        with suppress(queue.Empty):
            self._over.get(timeout=seconds)
            return True
        return False

    def close(self) -> None:
        """Close the channel from this side and end its thread."""
        self._loop.stop()
        self._thread.join()
        self._loop.close()
        self._sock.close()

    def _receive(self, events: int) -> None:
        try:
            data = self._sock.recv(_CHUNK)
        except OSError:
            data = b""
        try:
            self._reader.feed(data, self._on_frame)
        except ProcessGroupError as error:
            write_stderr(f"rankwise: {error}\n")
            data = b""
        if not data:
            self._loop.unregister(self._sock)
            self._release_pending()
            self._on_lost()

    def _on_frame(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STORE_REPLY:
            if on_reply := self._pending.pop(payload[:REQUEST_ID_SIZE], None):
                on_reply(payload[REQUEST_ID_SIZE:])
        elif kind is Kind.OVER:
            self._over.put(None)
        elif kind is Kind.REQUEST:
            number = signal_in(payload)
            if self._on_request is not None:
                self._on_request(number)
        elif kind is Kind.STOP:
            self._has_to_stop = True
            self._release_pending()
            self._call_stop()

    def _call_stop(self) -> None:
        if self._on_stop is not None and self._has_to_stop:
            # In a thread of its own: it wakes the main thread until that has left its work.
            threading.Thread(target=self._on_stop, name="rankwise-stop", daemon=True).start()

    def _release_pending(self) -> None:
        self._is_answered = False  # nor will later ones be
        for request_id in list(self._pending):
            if on_reply := self._pending.pop(request_id, None):
                on_reply(None)

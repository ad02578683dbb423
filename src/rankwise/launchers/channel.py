"""A rank's end of its channel to the supervisor, and the frames that travel on it."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, final

_HEADER = struct.Struct("!IB")
_REQUEST_ID = struct.Struct("!Q")
_CHUNK = 1 << 16


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # worker: my code runs
    FAILURE = 2  # worker: a failure record, as JSON
    DONE = 3  # worker: my part of the job is finished, my value is packed
    STOP = 4  # supervisor: leave; the payload says why
    OVER = 5  # supervisor: the job is over on every rank
    STORE_REQUEST = 6  # worker: a question to the private store
    STORE_REPLY = 7  # supervisor: its answer
    IN_LOOP = 8  # worker: from here on I stop at a boundary, if asked ("1"); no longer ("0")
    REQUEST = 9  # supervisor: the main process was told by this signal (its number) to stop
    STOPPED = 10  # worker: as DONE, but training has stopped for this signal (its number)
    ELSEWHERE = 11  # worker: a rank of another node has failed; its record, as JSON


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return one message as bytes: length, kind, payload."""
    return _HEADER.pack(len(payload), kind) + payload


def with_id(request_id: int, payload: bytes) -> bytes:
    """Return a store message that carries the number of its request."""
    return _REQUEST_ID.pack(request_id) + payload


def split_id(payload: bytes) -> tuple[int, bytes]:
    """Take a store message apart into the number of its request and the rest."""
    return _REQUEST_ID.unpack_from(payload)[0], payload[_REQUEST_ID.size :]


@final
class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Add bytes; yield the frames that are complete now."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Kind(kind), payload


@final
class RankChannel:
    """Send frames to the supervisor, ask its store, and hear from it in a thread of its own.

    Args:
        sock: this rank's end of the socket pair; owned from here on.
        on_lost: called from the channel's thread when the launching process is gone.
    """

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        self._sock = sock
        self._on_lost = on_lost
        self._on_stop: Callable[[], None] | None = None
        self._on_request: Callable[[int], None] | None = None
        self._stop_reason: str | None = None
        self._is_answered = True
        self._lock = threading.Lock()
        self._pending: dict[int, Callable[[bytes | None], None]] = {}
        self._last_id = 0
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="rankwise-channel", daemon=True)
        self._thread.start()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send one frame; silent when the launching process is gone, which `on_lost` deals with."""
        data = frame(kind, payload)
        if len(data) <= _CHUNK or threading.current_thread() is not threading.main_thread():
            self._send(data)
            return
        # This takes a while: a signal handler that raises meanwhile would cut it, and spoil what follows.
        sending = threading.Thread(target=self._send, args=(data,), name="rankwise-send", daemon=True)
        sending.start()
        sending.join()

    def _send(self, data: bytes) -> None:
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError:
            return

    def send_record(self, kind: Kind, record: dict[str, Any]) -> None:
        """Send one frame whose payload is JSON."""
        self.send(kind, json.dumps(record).encode("utf-8", "backslashreplace"))

    def ask_store(self, request: bytes, timeout_s: float) -> bytes:
        """Send a request to the private store and wait for its answer.

        Raises:
            TimeoutError: when there is none in time, the job is stopped, or its launching process is gone.
        """
        replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        request_id = self.post_store(request, replies.put)
        try:
            reply = replies.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        finally:
            self._pending.pop(request_id, None)
        if reply is None:
            raise TimeoutError
        return reply

    def post_store(self, request: bytes, on_reply: Callable[[bytes | None], None]) -> int:
        """Send a request to the private store; return its number.

        Args:
            request: what to send.
            on_reply: called from the channel's thread with the reply; with None when the job is stopped, or
                its launching process is gone.
        """
        with self._lock:
            self._last_id += 1
            request_id = self._last_id
            self._pending[request_id] = on_reply
        if not self._is_answered:
            self._release_pending()
        self.send(Kind.STORE_REQUEST, with_id(request_id, request))
        return request_id

    def call_on_stop(self, on_stop: Callable[[], None] | None) -> None:
        """Call `on_stop` from the channel's thread when the supervisor says stop (at once if it has)."""
        self._on_stop = on_stop
        if on_stop is not None and self._stop_reason is not None:
            threading.Thread(target=on_stop, name="rankwise-stop", daemon=True).start()

    def call_on_request(self, on_request: Callable[[int], None] | None) -> None:
        """Say whether this rank stops at a boundary when `on_request` is called with a signal's number."""
        self._on_request = on_request
        self.send(Kind.IN_LOOP, b"0" if on_request is None else b"1")

    def is_over_within(self, seconds: float | None) -> bool:
        """Wait for the supervisor to say that the job is over on every rank; return whether it did."""
        try:
            self._over.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    @property
    def is_stopping(self) -> bool:
        """Whether the supervisor has told this rank to leave."""
        return self._stop_reason is not None

    def close(self) -> None:
        """Close the channel from this side and end its thread."""
        self._on_lost = _nothing
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()

    def _listen(self) -> None:
        reader = FrameReader()
        while True:
            try:
                data = self._sock.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                break
            for kind, payload in reader.feed(data):
                self._receive(kind, payload)
        self._release_pending()
        self._on_lost()

    def _receive(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STORE_REPLY:
            request_id, answer = split_id(payload)
            if on_reply := self._pending.pop(request_id, None):
                on_reply(answer)
        elif kind is Kind.OVER:
            self._over.put(None)
        elif kind is Kind.REQUEST:
            if self._on_request is not None:
                self._on_request(int(payload))
        elif kind is Kind.STOP:
            self._stop_reason = payload.decode("utf-8", "replace")
            self._release_pending()
            if self._on_stop is not None:
                threading.Thread(target=self._on_stop, name="rankwise-stop", daemon=True).start()

    def _release_pending(self) -> None:
        self._is_answered = False  # nor will later ones be
        for request_id in list(self._pending):
            if on_reply := self._pending.pop(request_id, None):
                on_reply(None)


def _nothing() -> None:
    pass

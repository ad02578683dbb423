"""The private store: a table in the launching process, which ranks ask over their channels."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from rankwise.stores.values import decoded

_LENGTH = struct.Struct("!I")


def pack_fields(fields: Iterable[str | bytes]) -> bytes:
    """Return several texts or byte strings as one message."""
    message = bytearray()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        message += _LENGTH.pack(len(data)) + data
    return bytes(message)


def unpack_fields(data: bytes) -> list[bytes]:
    """Return the byte strings in a message; raise `ValueError` if it was not made by `pack_fields`."""
    fields, end = list[bytes](), 0
    while end < len(data):
        start = end + _LENGTH.size
        end = start + int.from_bytes(data[end:start], "big")
        if end > len(data):
            raise ValueError(f"not a message of the store: {len(data)} bytes, expected {end}")
        fields.append(data[start:end])
    return fields


Reply = Callable[[bytes], None]
Request = Callable[[bytes, float], bytes]


@dataclass
class _Waiting:
    """A request that waits until all its keys are set; only keys up to the last one of `missing` are not."""

    operation: bytes
    keys: list[bytes]
    reply: Reply
    missing: list[bytes]


@final
class StoreTable:
    """The supervisor's table of keys; it replies at once, or when the awaited keys are set."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._waiting: dict[object, _Waiting] = {}
        # By one key that is not set: a request does not take longer where many wait.
        self._names_by_key: dict[bytes, dict[object, None]] = {}

    def handle(self, request: bytes, reply: Reply, name: object = None) -> None:
        """Reply to a request of a `PrivateStore`, now or later; raise `ValueError` if it is not a request.

        `name` is for `cancel`.
        """
        operation, *fields = unpack_fields(request)
        if operation == b"wait" or (operation == b"get" and len(fields) == 1):
            name = object() if name is None else name
            self._waiting[name] = _Waiting(operation, fields, reply, fields[::-1])
            self._reply_if_set(name)
        else:
            reply(self._reply_to(operation, fields))
            for waiting in self._names_by_key.pop(fields[0], ()) if fields else ():
                self._reply_if_set(waiting)

    def cancel(self, name: object) -> None:
        """Drop a request that waits for keys: nobody waits for the reply."""
        if (waiting := self._waiting.pop(name, None)) is not None:
            names = self._names_by_key.get(waiting.missing[-1], {})
            names.pop(name, None)
            if not names:
                self._names_by_key.pop(waiting.missing[-1], None)

    def _reply_to(self, operation: bytes, fields: list[bytes]) -> bytes:
        store: Any = self._store  # whose stubs do not say that it takes bytes
        match operation, fields:
            case b"set", [key, value]:
                store.set(key, value)
                return b""
            case b"add", [key, amount]:
                number = int(amount)
                with suppress(RuntimeError, ValueError, IndexError, TypeError):
                    return b"%d" % store.add(key.decode(), number)
                return b""  # no number, or one beyond 64 bits: the rank raises
            case b"check", keys:
                return b"1" if store.check(keys) else b"0"
            case b"compare_set", [key, expected, desired]:
                return bytes(store.compare_set(key, expected, desired))
            case b"delete", [key]:
                return b"1" if store.delete_key(key) else b"0"
            case b"count", []:
                return b"%d" % store.num_keys()
        raise ValueError(f"not a request of the store: {operation!r} with {len(fields)} fields")

    def _reply_if_set(self, name: object) -> None:
        """Reply to a request that waits, if its keys are set; otherwise list it under one that is not."""
        store: Any = self._store
        if (waiting := self._waiting.get(name)) is None:
            return  # cancelled by an earlier reply
        while waiting.missing and store.check(waiting.missing[-1:]):
            waiting.missing.pop()
        if not waiting.missing and not store.check(waiting.keys):  # one was deleted since
            waiting.missing = [key for key in waiting.keys if not store.check([key])]
        if waiting.missing:
            self._names_by_key.setdefault(waiting.missing[-1], {})[name] = None
            return
        del self._waiting[name]
        waiting.reply(bytes(store.get(waiting.keys[0])) if waiting.operation == b"get" else b"")


@final
class PrivateStore(dist.Store):
    """A rank's store. Only processes with a channel of this job can use it.

    `request` sends a request over the channel and returns the reply. It raises `TimeoutError` where
    none comes in time, and `ConnectionError` where none will come. `wait` and `get` wait for a key as long as
    `timeout`.
    """

    def __init__(self, request: Request, timeout: timedelta) -> None:
        super().__init__()
        self._request = request
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def add(self, key: str, value: int) -> int:
        """Add to a key's number, 0 where it is not set; return the sum. Any other value is a `ValueError`."""
        total = self._ask("add", key, str(operator.index(value)))
        if not total:
            raise ValueError(f"cannot add {value} to {key!r}, whose value is no number")
        return decoded(int, total, "a sum")

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", *keys) == b"1"

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask("compare_set", key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key) == b"1"

    deleteKey = delete_key  # noqa: N815  the name that torch's PrefixStore calls

    def num_keys(self) -> int:
        return decoded(int, self._ask("count"), "a number of keys")

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> PrivateStore:
        """Return a store for another thread: this one, which several threads may use."""
        return self

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; raise torch's `DistStoreError` when they are not set in time."""
        limit = self._timeout if timeout is None else timeout
        self._ask("wait", *keys, timeout_s=limit.total_seconds())

    def _ask(self, operation: str, *fields: str | bytes, timeout_s: float | None = None) -> bytes:
        limit = self._timeout.total_seconds() if timeout_s is None else timeout_s
        try:
            return self._request(pack_fields([operation, *fields]), limit)
        except (TimeoutError, ConnectionError) as error:
            why = f"in {limit:g} s" if isinstance(error, TimeoutError) else "as the job has been stopped"
            message = f"store: {operation} of {', '.join(map(str, fields))} had no answer {why}"
            raise dist.DistStoreError(message) from None


def store_below_prefixes(store: dist.Store) -> dist.Store:
    """Return the store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def is_private(store: dist.Store) -> bool:
    """Return whether a store, or the one below all prefixes, is a `PrivateStore`."""
    return isinstance(store_below_prefixes(store), PrivateStore)

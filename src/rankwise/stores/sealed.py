"""Stores whose values only processes with a key can write: each value has a code, checked when it is read.

Torch's `TCPStore` has no password: any process that can connect to it can read and set all its keys.
"""

from __future__ import annotations

import hmac
import os
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from rankwise.errors import ConfigurationError, PeerAuthenticationError
from rankwise.start import JOB_KEY
from rankwise.stores.private import PrivateStore, store_below_prefixes

CODE_BYTES = 32
_HASH = "sha256"
_MIN_KEY = 16  # characters
_LENGTH_BYTES = 4
_PURPOSE = b"values of a store"
_PRIVATE = (PrivateStore, dist.HashStore)  # which only ranks of the job, or this process alone, can reach


def job_key_of_environment() -> bytes:
    """Return the key in `RANKWISE_JOB_KEY`, empty if that is not set; raise if it is too short."""
    key = os.environ.get(JOB_KEY, "")
    if 0 < len(key) < _MIN_KEY:
        raise ConfigurationError(
            message=f"The environment variable {JOB_KEY} has {len(key)} characters, which can be guessed.",
            remedy=f"export {JOB_KEY}=$(openssl rand -hex 32), the same value on every node.",
        )
    return os.fsencode(key)


class NamedPrefixStore(dist.PrefixStore):
    """Torch's prefix store with its prefix in `scope`, after the prefixes of such stores below it."""

    def __init__(self, prefix: str, store: dist.Store) -> None:
        super().__init__(prefix, store)
        self.scope = f"{scope_of(store)}{prefix}/"


def scope_of(store: dist.Store) -> str:
    """Return what the keys of a named prefix store begin with; an empty text for another store."""
    return str(getattr(store, "scope", ""))


@final
class SealedStore(dist.Store):
    """A store over another one that refuses values which no process with the key has written.

    A value's code (HMAC-SHA256) is for the value, its key and all prefixes, so that it cannot be moved to
    another key. What `add` counts, which keys exist, and the deletion of keys are not protected: a stranger
    can delay or end a job by them, so that nothing else may depend on them.

    `get` and `compare_set` raise `PeerAuthenticationError` for a value without the right code; `problem` is
    the error's text then, as torch may pass the error on as one of another type.
    """

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self._store: Any = store  # whose stubs do not say that it takes bytes
        self.problem = ""
        self._key = key
        self._value_key = hmac.digest(key, _PURPOSE, _HASH)
        self._scope = scope_of(store)

    def part(self, prefix: str) -> SealedStore:
        """Return the part of the store whose keys begin with a prefix."""
        return SealedStore(NamedPrefixStore(prefix, self._store), self._key)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or none for an empty one; return its value afterwards."""
        expected = self._sealed(key, expected_value) if expected_value else b""
        return self._opened(key, self._store.compare_set(key, expected, self._sealed(key, desired_value)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *(() if timeout is None else (timeout,)))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    deleteKey = delete_key  # noqa: N815  the name that torch's PrefixStore calls

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._store.timeout
        return timeout

    def clone(self) -> SealedStore:
        """Return a store for another thread: this one; calls of several threads wait for each other."""
        return self

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else bytes(value)
        return self._code(key, data) + data

    def _opened(self, key: str, sealed: bytes) -> bytes:
        sealed = bytes(sealed)
        code, value = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(key, value)):
            name = self._scope + key
            self.problem = f"No rank of the job has written the value of {name!r} in the job's store."
            raise PeerAuthenticationError(self.problem)
        return value

    def _code(self, key: str, value: bytes) -> bytes:
        name = f"{self._scope}{key}".encode()
        message = len(name).to_bytes(_LENGTH_BYTES, "big") + name + value
        return hmac.digest(self._value_key, message, _HASH)


def seal(store: dist.Store, key: bytes) -> dist.Store:
    """Return a store that refuses values written without the key; the same store if nobody else can write."""
    is_safe = isinstance(store_below_prefixes(store), (*_PRIVATE, SealedStore))
    return store if is_safe else SealedStore(store, key)


def unsealed(store: dist.Store) -> dist.Store:
    """Return the store below a sealed one, for torch, whose threads call it from C++."""
    return store._store if isinstance(store, SealedStore) else store


def part_of(store: dist.Store, prefix: str) -> dist.Store:
    """Return the part of a store whose keys begin with a prefix; a sealed store's is sealed too."""
    return store.part(prefix) if isinstance(store, SealedStore) else NamedPrefixStore(prefix, store)

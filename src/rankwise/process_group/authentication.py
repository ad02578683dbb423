"""Authenticate the ranks of each process group to each other, and the objects that they send.

A rank on gloo listens at a TCP port, and accepts the first process that connects with another rank's number.
So the two ranks of each connection of a new group send each other a code that only ranks of the job can
compute. Every object has such a code too, and is not unpickled without it.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankwise.errors import PeerAuthenticationError, ProcessGroupError, RendezvousTimeoutError
from rankwise.processes.listening_sockets import listening, open_sockets, shut
from rankwise.stores.sealed import (
    CODE_BYTES,
    NamedPrefixStore,
    SealedStore,
    job_key_of_environment,
    part_of,
    scope_of,
    seal,
)
from rankwise.stores.values import read_value
from rankwise.stores.waiting import OUT_OF_REACH, wait_for_keys

Data = bytes | bytearray | memoryview
_HASH = "sha256"
_HEADER = struct.Struct("!BiiQ")  # the purpose of a code, the ranks that send and receive it, its number
_CONNECTION, _OBJECT = 0, 1
_EVERYBODY = -1
_FINE = "fine"
_LOOK_S = 0.1  # how often a waiting rank checks whether another has found a foreign process


def group_secret(job_key: bytes, name: str, size: int, nonces: Sequence[str]) -> bytes:
    """Return the secret of a process group; `nonces` has a random text of each rank."""
    return hmac.digest(job_key, json.dumps(["process group", name, size, *nonces]).encode(), _HASH)


@final
class GroupKey:
    """A secret that only the ranks of one process group have. Each message has a number and a sender."""

    def __init__(self, secret: bytes, rank: int, size: int) -> None:
        self.secret = secret
        self._rank = rank
        self._size = size
        self._collectives = 0

    def codes_to_peers(self, number: int) -> bytes:
        """Return the codes that this rank sends over its connections to the others, by rank."""
        own = self._rank
        return b"".join(self._code(_CONNECTION, own, peer, number) for peer in range(self._size))

    def impostors(self, received: bytes, number: int) -> list[int]:
        """Return the ranks in whose place another process has sent its part of `received`."""
        starts = range(0, self._size * CODE_BYTES, CODE_BYTES)
        parts = [received[start : start + CODE_BYTES] for start in starts]
        return [
            peer
            for peer, part in enumerate(parts)
            if not hmac.compare_digest(part, self._code(_CONNECTION, peer, self._rank, number))
        ]

    def begin_collective(self) -> None:
        """Count one more collective of objects, on every rank."""
        self._collectives += 1

    def code_of(self, data: Data, sender: int | None = None) -> bytes:
        """Return the code of an object in this collective; `sender` is its rank in the group."""
        sender = self._rank if sender is None else sender
        return self._code(_OBJECT, sender, _EVERYBODY, self._collectives, data)

    def _code(self, purpose: int, sender: int, receiver: int, number: int, data: Data = b"") -> bytes:
        code = hmac.new(self.secret, _HEADER.pack(purpose, sender, receiver, number), _HASH)
        code.update(data)
        return code.digest()


@final
class _JobSettings(NamedTuple):
    key: bytes
    timeout: timedelta


# torch's class, if it has one: `init_process_group` and `new_group` create gloo groups by its name there.
_Gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
_lock = threading.Lock()
_jobs: list[_JobSettings] = []
_keys: WeakKeyDictionary[dist.ProcessGroup, GroupKey] = WeakKeyDictionary()
# By the store of each compared group: its key, and gloo's store, which gloo does not keep alive by itself.
_compared: WeakKeyDictionary[dist.Store, tuple[GroupKey, dist.Store]] = WeakKeyDictionary()


@contextmanager
def groups_authenticated(job_key: bytes | None, timeout: timedelta) -> Iterator[None]:
    """Authenticate the ranks of each gloo group that is created in the block, whoever creates it.

    `job_key` is a secret of the job's ranks that is not in their store; it may be empty. None: the key of the
    job that this process is in, or else of the environment. `timeout` is for the exchange.

    Mutates: two names of `torch.distributed.distributed_c10d`, until the block ends.
    """
    settings = _JobSettings(_settings().key if job_key is None else job_key, timeout)
    with _lock:
        _jobs.append(settings)
        if _Gloo is not None:
            distributed_c10d.ProcessGroupGloo = _GLOO  # type: ignore[misc]  # not a type
            distributed_c10d.PrefixStore = NamedPrefixStore  # type: ignore[misc]  # for the group's name
    try:
        yield
    finally:
        with _lock:
            _jobs.remove(settings)
            if not _jobs and _Gloo is not None:
                distributed_c10d.ProcessGroupGloo = _Gloo  # type: ignore[misc]
                distributed_c10d.PrefixStore = dist.PrefixStore  # type: ignore[misc]


def _settings() -> _JobSettings:
    jobs = _jobs[-1:]  # another thread's may end meanwhile
    return jobs[0] if jobs else _JobSettings(job_key_of_environment(), timedelta(minutes=2))


@final
class _AuthenticatedGloo:
    """Replaces torch's class of gloo groups: a group's connections are compared before anybody can use it."""

    def __call__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: object) -> Any:
        """Create a gloo group; compare its connections; take no further ones. `more` is of newer torch's."""
        if is_set := [f"{name}={value!r}" for name, value in more.items() if value]:
            raise ProcessGroupError(
                f"torch {torch.__version__} asks for a gloo group with {', '.join(is_set)}, with which "
                "rankwise cannot authenticate the ranks.",
                "create the group without that option.",
            )
        options = _Gloo._Options()
        options._timeout = timeout
        exchange = _Exchange(store, scope_of(store), rank, size, _settings()) if size > 1 else None
        if exchange is not None:
            exchange.meet(timeout)  # otherwise a foreign process can connect until the last rank arrives
        before = open_sockets()
        options._devices = _devices()  # they listen
        listeners = listening(open_sockets() - before)
        options._threads = 2 * len(options._devices)
        if exchange is None:
            gloo = _Gloo(store, rank, size, options)
        else:
            sealed = seal(store, exchange.key.secret)  # so that nobody can replace the ranks' addresses
            gloo = exchange.connect(sealed, options)
            exchange.compare(gloo)
            exchange.finish()
            of_group = getattr(store, "underlying_store", store)  # without the device
            _compared[of_group] = exchange.key, sealed
        # Gloo would accept any connection until it can open no more files, and then abort the process.
        shut(listeners)
        return gloo

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(self, name: str) -> Any:
        return getattr(_Gloo, name)


_GLOO: Any = _AuthenticatedGloo()


def _devices() -> list[Any]:
    """Return torch's devices that a gloo group listens at, for the interfaces that the user has named."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:  # as torch's class does
        return [_Gloo.create_device(interface=name) for name in names.split(",")]
    return [_Gloo.create_default_device()]


def key_of(group: dist.ProcessGroup | None = None) -> GroupKey:
    """Return a group's key; authenticate the ranks first, where the group was created in no job.

    Collective: every rank of the group must call this.

    Raises:
        PeerAuthenticationError: when another process has a rank's place.
        RendezvousTimeoutError: when a rank is missing.
    """
    found: Any = dist.group.WORLD if group is None else group
    if found not in _keys:
        _keys[found] = _make_key(found)
    return _keys[found]


def _make_key(group: dist.ProcessGroup) -> GroupKey:
    """Afterwards no rank of a default group, or of one on gloo, is still connecting."""
    settings, rank, size = _settings(), group.rank(), group.size()
    backend, store = distributed_c10d._world.pg_map[group]
    name = distributed_c10d._world.pg_names[group]
    if size == 1 or backend == "mpi":  # MPI has no store, and connects the ranks itself
        key = settings.key if size > 1 else secrets.token_bytes(CODE_BYTES)
        return GroupKey(group_secret(key, name, size, ()), rank, size)
    if store in _compared:
        return _compared[store][0]
    backends = _gloo_of(group)
    timeout = backends[0].options._timeout if backends else settings.timeout
    exchange = _Exchange(store, name, rank, size, _JobSettings(settings.key, timeout))
    exchange.meet(timeout)
    for gloo in backends:
        exchange.compare(gloo)
    if backends or group is dist.group.WORLD:
        exchange.finish()
    return exchange.key


def refuse_unknown_torch() -> None:
    """Raise ProcessGroupError where torch has just created the default group without the class above."""
    group: Any = dist.group.WORLD
    _, store = distributed_c10d._world.pg_map[group]
    if group.size() > 1 and _gloo_of(group) and store not in _compared:
        raise ProcessGroupError(
            f"torch {torch.__version__} creates gloo groups in a way in which rankwise cannot authenticate "
            "the ranks.",
            "use a version of torch that rankwise has been tested with.",
        )


def _gloo_of(group: dist.ProcessGroup) -> list[Any]:
    """Return a group's gloo back ends, without the wrappers of `TORCH_DISTRIBUTED_DEBUG=DETAIL`."""
    backends = [group._get_backend(device_type) for device_type in getattr(group, "_device_types", ())]
    plain = [getattr(backend, "wrapped_pg", backend) for backend in backends]
    return list({id(each): each for each in plain if _Gloo is not None and isinstance(each, _Gloo)}.values())


@final
class _Exchange:
    """The comparison of a new group's connections; all ranks learn how it went from the store."""

    key: GroupKey

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, settings: _JobSettings) -> None:
        store = NamedPrefixStore("rankwise", store)
        arrived = store.add("arrived", 1)
        number = (arrived - 1) // size  # a group of this name may have been there before
        self._part = part_of(store, str(number))
        self._store = seal(self._part, settings.key)
        self._is_last = arrived % size == 0
        self._name = name
        self._rank = rank
        self._size = size
        self._numbers = itertools.count()  # of the codes
        self._settings = settings
        self._timeout = settings.timeout
        self._deadline = time.monotonic() + settings.timeout.total_seconds()

    def meet(self, timeout: timedelta) -> None:
        """Wait until every rank is here, and make the group's key of a random text of each rank.

        So the key differs between groups, and between runs with the same job key. The time for the comparison
        begins then.
        """
        own, keys = secrets.token_hex(CODE_BYTES), [f"nonce/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], own)
        if self._is_last:
            self._wait_for(keys, timeout)
            self._store.set("nonces", json.dumps([self._store.get(key).decode() for key in keys]))
        self._wait_for(["nonces"], timeout)
        nonces = read_value(self._store, "nonces", list[str])
        if nonces[self._rank : self._rank + 1] != [own]:
            problem = "What the ranks of a new process group agreed on is of another one."
            raise PeerAuthenticationError(problem)
        secret = group_secret(self._settings.key, self._name, self._size, nonces)
        self.key = GroupKey(secret, self._rank, self._size)
        self._store = seal(self._part, self.key.secret)
        self._deadline = time.monotonic() + self._timeout.total_seconds()

    def _wait_for(self, keys: list[str], timeout: timedelta) -> None:
        if not wait_for_keys(self._store, keys, timeout):
            raise RendezvousTimeoutError("the other ranks of a new process group", timeout.total_seconds())

    def connect(self, store: dist.Store, options: Any) -> Any:
        """Create the gloo group, whose ranks find each other in `store`."""
        try:
            return _Gloo(store, self._rank, self._size, options)
        except Exception:
            if isinstance(store, SealedStore) and store.problem:
                self._raise(store.problem)
            raise

    def compare(self, gloo: Any) -> None:
        """Exchange codes with all other ranks; raise where one is wrong, here or elsewhere."""
        for _ in gloo.options._devices:  # whose connections gloo uses in turn
            self._compare_next(gloo, next(self._numbers))

    def _compare_next(self, gloo: Any, number: int) -> None:
        own = bytearray(self.key.codes_to_peers(number))
        codes = bytearray(len(own))
        sent, received = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (own, codes))
        options = distributed_c10d.AllToAllOptions()
        options.timeout = self._timeout
        work = gloo.alltoall_base(received, sent, [], [], options)
        while not self._is_done(work):
            if self._store.check(["outcome"]):
                self._raise_for_outcome()
            if time.monotonic() > self._deadline:
                raise self._timeout_error()
        if impostors := self.key.impostors(bytes(codes), number):
            places = ", ".join(map(str, impostors))
            here = f"rank {self._rank} of the {self._size} ranks of a process group"
            self._raise(f"{here} is connected to another process in place of rank {places}.")

    def finish(self) -> None:
        """Wait until all ranks have found nothing wrong; raise when one has."""
        if self._store.add("compared", 1) == self._size:
            self._store.compare_set("outcome", "", _FINE)
        left_s = max(0.0, self._deadline - time.monotonic())
        if not wait_for_keys(self._store, ["outcome"], timedelta(seconds=left_s)):
            raise self._timeout_error()
        self._raise_for_outcome()

    def _is_done(self, work: Any) -> bool:
        """Wait a moment; return whether the exchange is over, and raise how it failed."""
        with suppress(RuntimeError):
            return bool(work.wait(timedelta(seconds=_LOOK_S)))
        if not work.is_completed():
            return False
        try:
            return bool(work.wait())  # it may have ended well, just after that wait
        except RuntimeError as error:
            if self._store.check(["outcome"]):  # then the other rank has left the group
                self._raise_for_outcome()
            # A rank that has ended looks the same; torch's words say that this may be a consequence.
            raise RuntimeError(f"{error} (while {self._what()})") from None

    def _raise(self, problem: str) -> NoReturn:
        """Raise this rank's own finding, whatever the store says; tell the others, if that is possible."""
        with suppress(*OUT_OF_REACH):
            self._store.compare_set("outcome", "", problem)
        raise PeerAuthenticationError(problem) from None

    def _raise_for_outcome(self) -> None:
        if (outcome := self._store.get("outcome").decode(errors="replace")) != _FINE:
            raise PeerAuthenticationError(outcome)

    def _timeout_error(self) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(f"all ranks while {self._what()}", self._timeout.total_seconds())

    def _what(self) -> str:
        return (
            f"the {self._size} ranks of a process group compared whether they are connected to each other: "
            "one of them hangs or has ended, or another process has taken its place"
        )

"""The job's store: host torch's `TCPStore` on a socket that rankwise binds, or connect to it."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import NamedTuple, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rankwise.environments.network import LOOPBACK
from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.stores.private import PrivateStore, Request
from rankwise.stores.sealed import NamedPrefixStore, seal

_BACKLOG = 1024
_LIBUV_TAKES_SOCKETS = "2.8"  # the first torch whose default server takes a socket that listens already

# By address, which a later job of this process uses again: they stay open as long as the process lives.
_joined: dict[tuple[str, int], dist.Store] = {}  # clients of the address that an outer launcher gave
_hosted: dict[tuple[str, int], dist.Store] = {}
_secrets: WeakKeyDictionary[dist.Store, bytes] = WeakKeyDictionary()  # of default groups, by their stores


@final
class RendezvousEndpoint(NamedTuple):
    """Host and port of a job's store, and whether this node hosts it."""

    address: tuple[str, int]
    hosts: bool


def job_prefix(job: int, start: int = 0) -> str:
    """Return what the keys of one job, in one start of it, begin with."""
    return f"start{start}/job{job}"


def store_of_job(store: dist.Store, job: int, start: int = 0, *, key: bytes = b"") -> dist.Store:
    """Return the part of a store that belongs to one job, in one start of it; sealed with the job's key."""
    return seal(NamedPrefixStore(job_prefix(job, start), store), key)


def host_store(
    timeout: timedelta, address: tuple[str, int] = (LOOPBACK, 0)
) -> tuple[dist.Store, tuple[str, int]]:
    """Host a TCP store, by default on loopback at a port that the kernel chooses; return it and its address.

    It listens until it is deleted. Where this process listens there already for a process group that the user
    has created by `env://`, the store is that one.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE and (own := _hosted_by_torch(address, timeout)) is not None:
            return own, address
        raise ProcessGroupError(
            f"The store of the job cannot listen at {address[0]}:{address[1]} on {socket.gethostname()!r}: "
            f"{error.strerror or error}.",
            "set MASTER_ADDR to an address of global_rank 0's node, and MASTER_PORT to a free port there.",
        ) from None
    host, port = listener.getsockname()[:2]
    store = dist.TCPStore(
        *(host, port, None, True, timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=torch.__version__ >= _LIBUV_TAKES_SOCKETS,
    )
    return store, (host, port)


def _hosted_by_torch(address: tuple[str, int], timeout: timedelta) -> dist.Store | None:
    """Return the store of a process group that exists, if torch hosts it in this process at this port.

    It listens as long as it has a client in this process, so it may outlive the group.
    """
    if not dist.is_initialized():
        return None
    try:
        return dist.TCPStore(*address, None, True, timeout, wait_for_workers=False, multi_tenant=True)
    except dist.DistNetworkError:  # another process listens there
        return None


def hosted_store(timeout: timedelta, address: tuple[str, int]) -> dist.Store:
    """Host a TCP store as long as this process lives: another node may start the next job before this one."""
    if address not in _hosted:
        _hosted[address] = host_store(timeout, address)[0]
    return _hosted[address]


def hosted_here(address: tuple[str, int]) -> dist.Store:
    """Return the store that `hosted_store` hosts at an address; raise `KeyError` where it hosts none."""
    return _hosted[address]


def open_store(
    ask: Request | None, address: tuple[str, int] | None, *, hosts: bool, timeout: timedelta
) -> dist.Store:
    """Return this rank's store. Keep a reference while a process group uses it: C++ keeps none.

    It is the TCP store at `address`, or else the private store, to which `ask` sends requests; without either
    this is the only rank. `timeout` is how long to wait for the host, and for keys.
    """
    if address is not None:
        if address not in _joined:
            _joined[address] = host_store(timeout, address)[0] if hosts else open_another(address, timeout)
        return _joined[address]
    return dist.HashStore() if ask is None else PrivateStore(ask, timeout)


def open_another(address: tuple[str, int], timeout: timedelta) -> dist.Store:
    """Return another client of the TCP store at an address: calls to one client wait for each other."""
    try:
        return dist.TCPStore(*address, None, False, timeout)
    except dist.DistNetworkError as error:
        waiting_for = f"the store at {address[0]}:{address[1]} ({error})"
        raise RendezvousTimeoutError(waiting_for, timeout.total_seconds()) from None


def forget_store(address: tuple[str, int]) -> None:
    """Delete the client of the store at an address, and the store if this process hosts it."""
    _joined.pop(address, None)
    _hosted.pop(address, None)


def default_store() -> dist.Store:
    """Return the default process group's store, for which torch has no public name.

    It is sealed with the group's secret, if the group has one and the store is not private.
    """
    store = distributed_c10d._get_default_store()
    return seal(store, _secrets[store]) if store in _secrets else store


def seal_default_store(secret: bytes) -> None:
    """Seal what `default_store` returns from now on; every rank must do so."""
    _secrets[distributed_c10d._get_default_store()] = secret

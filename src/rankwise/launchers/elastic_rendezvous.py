"""Rendezvous handlers for torch's elastic agent: on one node, and between nodes.

torch (2.13) keeps the store of the first start for all later ones and publishes its address in that start
only: a node that comes back waits for it in vain. Each agent counts restarts by itself, so that nodes may
disagree on which start it is. Torch's stores listen on every interface.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rankwise.errors import ProcessGroupError
from rankwise.stores.restart import RestartInfo
from rankwise.stores.tcp import host_store, open_another

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "rankwise_loopback"
"""The name of the rendezvous of one node, for `LaunchConfig(rdzv_backend=...)`."""
NODES = "rankwise_nodes"
"""The name of the rendezvous between nodes."""

_DEFAULT_PORT = 29400  # torch's
_ANSWER = timedelta(seconds=60)  # torch's
_MEETING = "rankwise/meeting"


def register() -> None:
    """Register both rendezvous handlers with torch; idempotent."""
    rendezvous_handler_registry.register(LOOPBACK, LoopbackRendezvous)
    rendezvous_handler_registry.register(NODES, NodesRendezvous)


class _AgentRendezvous(RendezvousHandler):
    """A rendezvous whose ranks are clients of a store that an agent hosts, a new one for each start.

    `on_start` of the parameters is called with each start, which is the same on all nodes.
    """

    use_agent_store = True
    name: ClassVar[str]

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._timeout = timedelta(seconds=parameters.get_as_int("timeout", 600) or 600)
        self._on_start: Callable[[RestartInfo], None] = parameters.config["on_start"]
        self._store: Store | None = None

    def get_backend(self) -> str:
        return self.name

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


@final
class LoopbackRendezvous(_AgentRendezvous):
    """A rendezvous of one agent, on the loopback interface."""

    name = LOOPBACK

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(parameters)
        self._job = f"{self._run_id}/{secrets.token_hex(8)}"  # another job may have the same id
        self._starts = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Host a new store, without the keys of the start before."""
        self._on_start(RestartInfo(self._starts, self._job))
        self._starts += 1
        self._store, address = host_store(self._timeout)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(*address))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0


@final
class NodesRendezvous(_AgentRendezvous):
    """torch's handler, except that the node of rank 0 hosts a new store for each start.

    `own_address` of the parameters returns, given the endpoint's host, where this node listens.
    """

    name = NODES

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(parameters)
        host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORT)
        self._own_address: Callable[[], str] = partial(parameters.config["own_address"], host)
        store = self._agents_store(host, port, parameters.get_as_bool("is_host"))
        backend = C10dRendezvousBackend(store, parameters.run_id)
        self._inner: Any = create_handler(store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents; take the store of this start, without the keys of the one before."""
        self._store = None
        info: RendezvousInfo = self._inner.next_rendezvous()
        if info.rank == 0:
            self._open(info.store)
        host, port, *start = json.loads(info.store.get(_MEETING))
        self._on_start(RestartInfo(*start))
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(host, port))

    def _open(self, endpoint: Any) -> None:
        """Host the store of this start; publish its address in `endpoint`, the agents' own store."""
        self._store, (host, port) = host_store(self._timeout, (self._own_address(), 0))
        agents = PrefixStore(f"rankwise/{self._run_id}", endpoint.underlying_store)
        token = agents.compare_set("job", "", secrets.token_hex(8)).decode()  # the first start's
        job = f"{self._run_id}/{token}"  # another job may have the same id, at another time
        endpoint.set(_MEETING, json.dumps([host, port, agents.add("starts", 1) - 1, job]))
        # torch's handler waits for these on a node that is new in this start.
        endpoint.set(RendezvousStoreInfo.MASTER_ADDR_KEY, host)
        endpoint.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port))

    def _agents_store(self, host: str, port: int, is_host: bool | None) -> Store:
        """Return the store in which the agents meet; host it if the endpoint is this host, and free."""
        is_here = _is_this_host(host, port) if is_host is None else is_host
        address = (self._own_address() if is_here else host, port)
        try:
            store = host_store(self._timeout, address)[0] if is_here else open_another(address, self._timeout)
        except ProcessGroupError:
            if is_host:
                raise
            store = open_another(address, self._timeout)  # another agent of this host has it
        store.set_timeout(_ANSWER)
        return store

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return int(self._inner.num_nodes_waiting())

    def shutdown(self) -> bool:
        return super().shutdown() and bool(self._inner.shutdown())


def _is_this_host(host: str, port: int) -> bool:
    """Whether a name or an address is this host's own. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own, other = (str(end[0]).partition("%")[0] for end in (probe.getsockname(), probe.getpeername()))
    except OSError:
        return False  # the name does not resolve, or not yet
    return own == other or ipaddress.ip_address(own).is_loopback

"""Rendezvous handlers for torch's elastic agent: on one node, and between nodes.

torch (2.13) keeps the store of the first start for all later ones, and publishes its address in that start
only: a node that rejoins waits for it in vain. Each agent counts restarts by itself, so nodes may disagree
on the number of the start. Torch's stores listen on every interface. Its agents load the list of nodes from
the store as a pickle, whoever has written it.
"""

from __future__ import annotations

import datetime as dt
import io
import ipaddress
import json
import pickle
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rankwise.errors import PeerAuthenticationError, ProcessGroupError
from rankwise.stores.rendezvous import RestartInfo
from rankwise.stores.sealed import NamedPrefixStore, job_key_of_environment, seal
from rankwise.stores.tcp import host_store, open_another
from rankwise.stores.values import read_value

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK_HANDLER = "rankwise_loopback"
"""The name of the rendezvous of one node, for `LaunchConfig(rdzv_backend=...)`."""
NODES = "rankwise_nodes"
"""The name of the rendezvous between nodes."""

_DEFAULT_PORT = 29400  # torch's
_ANSWER = timedelta(seconds=60)  # torch's
_MEETING = "rankwise/meeting"
# The classes in a pickled list of nodes, besides built-in types.
_NodeList: Any = dynamic_rendezvous._RendezvousState
_PARTS = (_NodeList, dynamic_rendezvous._NodeDesc, dt.datetime, dt.timedelta, dt.timezone)


class _AgentRendezvous(RendezvousHandler):
    """A rendezvous in which ranks connect to a store that an agent hosts; each start has a new store.

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

    name = LOOPBACK_HANDLER

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


class _NodeListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        for part in _PARTS:
            if (module, name) == (part.__module__, part.__qualname__):
                return part
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@final
class _CheckedBackend(C10dRendezvousBackend):
    """torch's back end, with a check that the state is a list of nodes: torch loads it as a pickle."""

    def get_state(self) -> tuple[bytes, Any] | None:
        found: tuple[bytes, Any] | None = _checked(super().get_state())
        return found

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found: tuple[bytes, Any, bool] | None = _checked(super().set_state(state, token))
        return found


def _checked(found: Any) -> Any:
    """Return what a back end has found, if any; raise torch's error if its pickle is not a list of nodes."""
    if found is None:
        return None
    try:
        fields = vars(_NodeListUnpickler(io.BytesIO(found[0])).load())
    except Exception as error:  # noqa: BLE001  a pickle that is damaged may raise any
        raise RendezvousStateError(str(error) or type(error).__name__) from None
    if _kinds_of(fields) != _kinds_of(vars(_NodeList())):
        raise RendezvousStateError("it has other fields")
    return found


def _kinds_of(fields: dict[str, object]) -> dict[str, type | None]:
    return {name: None if name == "deadline" else type(value) for name, value in fields.items()}


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
        backend = _CheckedBackend(store, parameters.run_id)
        self._endpoint = f"{host}:{port}"
        self._inner: Any = dynamic_rendezvous.create_handler(store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents; take the store of this start, without the keys of the one before."""
        self._store = None
        with self._strangers_named():
            info: RendezvousInfo = self._inner.next_rendezvous()
        if info.rank == 0:
            self._open(info.store)
        meeting = seal(info.store, job_key_of_environment())
        host, port, number, job = read_value(meeting, _MEETING, tuple[str, int, int, str])
        self._on_start(RestartInfo(number, job))
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(host, port))

    def _open(self, endpoint: Any) -> None:
        """Host the store of this start; publish its address in `endpoint`, the agents' own store."""
        self._store, (host, port) = host_store(self._timeout, (self._own_address(), 0))
        key = job_key_of_environment()
        agents = seal(NamedPrefixStore(f"rankwise/{self._run_id}", endpoint.underlying_store), key)
        token = agents.compare_set("job", "", secrets.token_hex(8))  # the first start's
        job = f"{self._run_id}/{token.decode(errors='replace')}"  # other jobs may have the same id
        meeting = [host, port, agents.add("starts", 1) - 1, job]
        seal(endpoint, key).set(_MEETING, json.dumps(meeting))
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
        with self._strangers_named():
            return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        with self._strangers_named():
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        with self._strangers_named():
            return int(self._inner.num_nodes_waiting())

    def shutdown(self) -> bool:
        return super().shutdown() and bool(self._inner.shutdown())

    @contextmanager
    def _strangers_named(self) -> Iterator[None]:
        try:
            yield
        except RendezvousStateError as error:
            problem = "No agent of the job has written the list of nodes in the agents' store at"
            raise PeerAuthenticationError(f"{problem} {self._endpoint}: {error}.") from None


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


rendezvous_handler_registry.register(LOOPBACK_HANDLER, LoopbackRendezvous)
rendezvous_handler_registry.register(NODES, NodesRendezvous)

"""Where the elastic agent of a one-node job meets itself: a store on loopback, a new one for each start."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, rendezvous_handler_registry
from typing_extensions import final

from rankwise.process_group.rendezvous import host_store
from rankwise.process_group.starts import Start

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["LOOPBACK", "register_loopback"]

LOOPBACK = "rankwise_loopback"
"""The name of the rendezvous back end, for `LaunchConfig(rdzv_backend=...)`."""


def register_loopback() -> None:
    """Make the back end known to torch; again and again does no harm."""
    rendezvous_handler_registry.register(LOOPBACK, LoopbackRendezvous)


@final
class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one. torch's own back ends listen on every interface.

    Args:
        parameters: what the launcher was configured with; `on_start` in it is told of each start.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._timeout = timedelta(seconds=parameters.get_as_int("timeout", 600) or 600)
        self._on_start: Callable[[Start], None] = parameters.get("on_start", _nothing)
        self._job = f"{self._run_id}/{secrets.token_hex(8)}"  # another job may have the same id
        self._starts = 0
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        """Every rank is a client of the store that this process hosts."""
        return True

    def get_backend(self) -> str:
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """Host a new store: a restarted job must not find the keys of the one before."""
        self._on_start(Start(self._starts, self._job))
        self._starts += 1
        self._store, address = host_store(self._timeout)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(*address))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def _nothing(start: Start) -> None:
    pass

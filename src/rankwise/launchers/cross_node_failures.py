"""What a node's launching process tells the other nodes: which of its ranks ended unheard by them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, final

from rankwise.failures.record import FailureRecord
from rankwise.launchers.context import RendezvousEndpoint, store_of_job
from rankwise.ranks import RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store

_LIMIT = timedelta(seconds=12)  # a slow resolver holds up a TCPStore client for 5 s
# How long a process has to leave a job before the store that it hosts goes.
_GRACE_S = 1.0


@final
class CrossNodeFailures:
    """Tell the ranks of other nodes of an end that no rank could tell them.

    Which ended by a signal, or `os._exit`; or in whatever way before it had met them.

    Args:
        meeting: where the nodes of the job meet; None for a job on one node, which has nobody to tell.
        ranks: those of this node's first process.

    Attributes:
        job: counts the jobs that meet there, as the seats do.
    """

    def __init__(self, endpoint: RendezvousEndpoint | None, ranks: RankInfo, job: int = 1) -> None:
        self.job = job
        self._endpoint = endpoint
        self._ranks = ranks
        self._publish_outcome: threading.Thread | None = None

    def tell(self, record: FailureRecord) -> None:
        """Leave a record in the job's store, in a thread: the store may be out of reach."""
        if self._endpoint is None or self._publish_outcome is not None or not self._has_to_tell(record):
            return
        self._publish_outcome = threading.Thread(
            target=self._tell, args=(record,), name="rankwise-other-nodes", daemon=True
        )
        self._publish_outcome.start()

    def wait_until_published(self) -> None:
        """Give what is being told the time to arrive; and where the store is here, to be read."""
        if self._publish_outcome is not None:
            self._publish_outcome.join(_LIMIT.total_seconds())
        if self._endpoint is not None and self._endpoint.hosts:
            _in_reach(self._wait_until_read)

    def forget_store_soon(self, is_in_job: Callable[[], bool]) -> None:
        """Let go of the store where it is here, and this process is in its job still: a wait in it ends so.

        Such a wait is in C++ and hears no signal. The ranks of other nodes get the time to read what failed.
        """
        if self._endpoint is None or not self._endpoint.hosts:
            return
        destroy_groups = threading.Timer(_GRACE_S, self._forget_store, (self._endpoint.address, is_in_job))
        destroy_groups.daemon = True
        destroy_groups.start()

    def _forget_store(self, address: tuple[str, int], is_in_job: Callable[[], bool]) -> None:
        from rankwise.stores.tcp import forget_store

        self.wait_until_published()
        if is_in_job():
            forget_store(address)

    def _has_to_tell(self, record: FailureRecord) -> bool:
        is_ours = record.node_rank == self._ranks.node_rank
        is_cause = not (record.is_consequence or record.is_timeout)
        return is_ours and is_cause and (record.exit_status is not None or not record.has_met)

    def _tell(self, record: FailureRecord) -> None:
        from rankwise.failures.exchange import publish_failure

        _in_reach(lambda: publish_failure(self._store(), record.to_json(), self._ranks.world_size))

    def _wait_until_read(self) -> None:
        from rankwise.failures.exchange import published_failure, wait_until_read

        store = self._store()
        if (left := published_failure(store)) is not None:
            nodes = {self._ranks.node_rank, FailureRecord.from_json(left).node_rank}
            size = self._ranks.local_world_size
            everyone = range(self._ranks.world_size)
            wait_until_read(store, [rank for rank in everyone if rank // size not in nodes])

    def _store(self) -> Store:
        from rankwise.stores.tcp import hosted_here, open_another

        if self._endpoint is None:
            raise ValueError("a job on one node has no other nodes")
        address = self._endpoint.address
        store = hosted_here(address) if self._endpoint.hosts else open_another(address, _LIMIT)
        return store_of_job(store, self.job)


def _in_reach(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # noqa: BLE001  a store that is gone, or never was: nobody is left to tell
        return

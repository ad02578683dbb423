"""`InlineLauncher`: start nothing: the processes exist (torchrun, by hand), or one is enough."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from rankwise.launchers.context import Entry, Launcher, WorkerContext
from rankwise.monitoring.heartbeat import NO_FILE, heartbeat_written_to
from rankwise.monitoring.stacks import stacks_on_signal
from rankwise.processes import parent_death
from rankwise.ranks import RankInfo
from rankwise.stores.restart import find_restart
from rankwise.stores.tcp import open_store

_ANSWER = timedelta(seconds=60)
# Counts the jobs of this process: all of them use the one store of the launcher that started it.
_jobs = itertools.count(1)


@final
class InlineLauncher(Launcher):
    """Run the function in this process, which is a rank already.

    Args:
        ranks: who this process is.
        address: where the job's store is; None for a single process, unless an elastic agent started it.
        hosts_store: whether this rank has to host that store.
        store_outlives: whether it is an elastic agent's, which stays when the ranks are restarted.
    """

    runs_in_caller = True

    def __init__(
        self,
        ranks: RankInfo,
        address: tuple[str, int] | None = None,
        *,
        hosts_store: bool = False,
        store_outlives: bool = False,
    ) -> None:
        self._ranks = ranks
        self._address = address if ranks.world_size > 1 else None
        self._agents_store = address if store_outlives else None
        self._hosts_store = hosts_store

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        """Call `entry`; record a failure in torchrun's error file, if there is one, and raise it."""
        if self._agents_store is not None and self._address is None:
            store = open_store(None, self._agents_store, hosts=False, timeout=_ANSWER)
            find_restart(self._agents_store, store, self._ranks, _ANSWER)
        worker = WorkerContext(
            self._ranks,
            address=self._address,
            hosts_store=self._hosts_store,
            store_outlives=self._agents_store is not None,
            job=next(_jobs),
        )
        try:
            with ExitStack() as stack:
                stack.enter_context(stacks_on_signal())
                stack.enter_context(parent_death.children_end_with_parent())
                if self._address:
                    stack.enter_context(heartbeat_written_to(NO_FILE))
                return {self._ranks.global_rank: entry(worker)}
        except Exception as error:
            get_error_handler().record_exception(error)  # to TORCHELASTIC_ERROR_FILE, if it is set
            raise

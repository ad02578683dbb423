"""`InlineLauncher`: start nothing: the processes exist (torchrun, by hand), or one is enough."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import final

from rankwise.launchers.context import CallerLauncher, RankRun, WorkerContext
from rankwise.launchers.preconditions import refuse_patched_threads
from rankwise.monitoring.heartbeat import NO_FILE, heartbeat_written_to
from rankwise.monitoring.stacks import stacks_on_signal
from rankwise.processes import parent_death
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import find_restart
from rankwise.stores.tcp import open_store

_ANSWER = timedelta(seconds=60)
# Counts the jobs of this process: all of them use the one store of the launcher that started it.
_jobs = itertools.count(1)
_has_last_succeeded = False  # whether the last job of this process has ended without a failure


@final
@dataclass(frozen=True)
class InlineLauncher(CallerLauncher):
    """Run the function in this process, which is a rank already."""

    ranks: RankInfo
    address: tuple[str, int] | None = None  # of the store; of a single rank only where it is an agent's
    hosts_store: bool = False
    store_outlives: bool = False  # it is an elastic agent's, which stays when the ranks are restarted

    @property
    def has_other_ranks(self) -> bool:
        return self.ranks.world_size > 1

    def context_between_jobs(self) -> WorkerContext | None:
        """Return the context of this process, if it is not alone and its last job has succeeded."""
        is_shared = self.has_other_ranks and self.address is not None
        return self._context(self.address, job=0) if is_shared and _has_last_succeeded else None

    def _context(self, address: tuple[str, int] | None, job: int) -> WorkerContext:
        return WorkerContext(
            self.ranks,
            address=address,
            hosts_store=self.hosts_store,
            store_outlives=self.store_outlives,
            job=job,
        )

    @contextmanager
    def running(self, rendezvous: str) -> Iterator[RankRun]:
        """Be the rank in the block; report a failure, and raise it."""
        global _has_last_succeeded
        if self.has_other_ranks:
            refuse_patched_threads()
        address = self.address
        if address is not None and self.ranks.world_size == 1:
            store = open_store(None, address, hosts=False, timeout=_ANSWER)
            find_restart(address, store, self.ranks, _ANSWER)
            address = None
        worker = self._context(address, next(_jobs))
        try:
            page = None if address is None else NO_FILE
            with stacks_on_signal(), parent_death.children_end_with_parent(), heartbeat_written_to(page):
                _has_last_succeeded = False
                yield (run := RankRun(worker))
                run.values = {self.ranks.global_rank: run.value}
                _has_last_succeeded = True
        except Exception as error:
            worker.report_failure(error)
            raise

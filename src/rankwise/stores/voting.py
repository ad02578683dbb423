"""`StoreCounter`: count in the store, without a collective, how many ranks vote for something."""

from __future__ import annotations

from datetime import timedelta
from typing import final

import torch.distributed as dist

from rankwise.stores.tcp import default_store

_FOR = 1 << 32  # votes for count in the upper half, all votes in the lower


@final
class StoreCounter:
    """A series of votes among the ranks of a process group.

    Collective: every rank must make one, and then hold the same votes.

    Args:
        group: the ranks that vote; None for all.
        timeout: how long to wait for the other ranks' votes.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self._store = default_store()
        self._timeout = timeout
        self._size = len(ranks)
        scope = f"votes/{ranks[0]}"
        series = self._store.add(f"{scope}/series of {dist.get_rank()}", 1)  # the same number on every rank
        self._prefix = f"{scope}/{series}"

    def count(self, number: int, *, is_for: bool) -> int:
        """Vote, and return how many ranks voted for it.

        Collective: every rank must call this.

        Raises:
            torch.distributed.DistStoreError: when a rank has not voted in time.
        """
        votes, result = self._keys(number)
        total = self._store.add(votes, 1 + (_FOR if is_for else 0))
        if total % _FOR == self._size:
            self._store.set(result, str(total // _FOR))
            for key in self._keys(number - 2):  # all ranks have voted since, and so have read that result
                self._store.delete_key(key)
        self._store.wait([result], self._timeout)
        return int(self._store.get(result))

    def _keys(self, number: int) -> tuple[str, str]:
        return f"{self._prefix}/{number}/votes", f"{self._prefix}/{number}/result"

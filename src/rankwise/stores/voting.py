"""`StoreCounter`: the ranks count, at the store and in no collective, how many of them have something."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch.distributed as dist

from rankwise.stores.tcp import default_store

if TYPE_CHECKING:
    from rankwise.strategies import Strategy

__all__ = ["StoreCounter"]

_FOR = 1 << 32  # a vote for counts in the upper half, every vote in the lower


@final
class StoreCounter:
    """A series of votes among the ranks that share out the data.

    Collective: every rank must make one, and then hold the same votes.
    """

    def __init__(self, strategy: Strategy) -> None:
        group = strategy.data_parallel_group
        workers = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self._store = default_store()
        self._timeout = strategy.timeout
        self._size = len(workers)
        scope = f"votes/{workers[0]}"
        series = self._store.add(f"{scope}/series of {strategy.global_rank}", 1)  # as many on every rank
        self._prefix = f"{scope}/{series}"

    def count(self, number: int, *, is_for: bool) -> int:
        """Vote, and return how many ranks voted for it.

        Collective: every rank must call this.

        Raises:
            torch.distributed.DistStoreError: when a rank has not voted in the group's timeout.
        """
        poll, result = self._keys(number)
        total = self._store.add(poll, 1 + (_FOR if is_for else 0))
        if total % _FOR == self._size:
            self._store.set(result, str(total // _FOR))
            for key in self._keys(number - 2):  # all have read that one: they have voted since
                self._store.delete_key(key)
        self._store.wait([result], self._timeout)
        return int(self._store.get(result))

    def _keys(self, number: int) -> tuple[str, str]:
        return f"{self._prefix}/{number}/votes", f"{self._prefix}/{number}/result"

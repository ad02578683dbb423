"""`rank_zero_first`: one rank does something before the others; they wait at the store, in no collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from rankwise.errors import InvalidArgumentError, RankZeroFailedError
from rankwise.process_group._members import is_distributed
from rankwise.process_group.causes import text_of
from rankwise.process_group.sections import going_first
from rankwise.process_group.stores import default_store
from rankwise.ranks import RankInfo

__all__ = ["rank_zero_first"]

_PATIENCE = timedelta(days=7)  # a download may take hours; a rank that dies ends the job in other ways
_DONE = "done"


@contextmanager
def rank_zero_first(
    local: bool = False,
    *,
    ranks: RankInfo | None = None,
    store: dist.Store | None = None,
    timeout: timedelta = _PATIENCE,
) -> Iterator[None]:
    """Run the block on rank zero first, then on all other ranks at once; without a process group, at once.

    Collective: every rank must enter it, in the same order. Nobody sits in a collective meanwhile, so rank
    zero may take longer than the group's timeout. In the block it can do nothing with them.

    Args:
        local: local rank 0 of each node goes first, instead of the job's.
        ranks: who this process is; needed with `local`, otherwise the process group says it.
        store: where to wait; the process group's own by default.
        timeout: how long the others wait at most.

    Raises:
        RankZeroFailedError: on the others, when the block failed on the first; it has the exception's text.
        InvalidArgumentError: with `local` and no `ranks`.
        LifecycleError: out of a collective in the block, on the rank that goes first.
        torch.distributed.DistStoreError: when `timeout` is over.

    Example:
        >>> with rank_zero_first():
        ...     path = "a file that is downloaded once"
    """
    if not is_distributed():
        yield
        return
    is_first, scope = _place(local, ranks)
    meeting = default_store() if store is None else store
    turn = meeting.add(f"rank_zero_first/{scope}/turns of {dist.get_rank()}", 1)  # as many on every rank
    key = f"rank_zero_first/{scope}/{turn}"
    if is_first:
        with _telling(meeting, key), going_first(is_local=local):
            yield
    else:
        _await(meeting, key, timeout)
        yield


def _place(local: bool, ranks: RankInfo | None) -> tuple[bool, str]:
    """Return whether this rank goes first, and the name of those that take turns together."""
    if not local:
        return dist.get_rank() == 0, "job"
    if ranks is None:
        raise InvalidArgumentError(
            argument="ranks", value=None, expected="a RankInfo with local=True: it says who shares a node"
        )
    return ranks.local_rank == 0, f"node{ranks.node_rank}"


@contextmanager
def _telling(store: dist.Store, key: str) -> Iterator[None]:
    rank = dist.get_rank()
    try:
        yield
    except BaseException as error:
        failure = f"{rank} {type(error).__name__}: {text_of(error)}"
        told = failure.encode(errors="backslashreplace").decode()  # a file's name may be no UTF-8
        with suppress(Exception):  # a store that is gone, where nobody waits any more
            store.set(key, told)
        raise
    store.set(key, _DONE)


def _await(store: dist.Store, key: str, timeout: timedelta) -> None:
    store.wait([key], timeout)
    outcome = store.get(key).decode("utf-8", "replace")
    if outcome != _DONE:
        rank, _, failure = outcome.partition(" ")
        raise RankZeroFailedError(global_rank=int(rank), failure=failure)

"""`rank_zero_first`, and the guard against collectives in sections of rank 0."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import final

import torch.distributed as dist

from rankwise.errors import InvalidArgumentError, LifecycleError, RankZeroFailedError
from rankwise.failures.classify import text_of
from rankwise.process_group.collectives import is_distributed
from rankwise.process_group.interception import Call, intercepted
from rankwise.ranks import RankInfo, is_in_rank_zero_section
from rankwise.stores.tcp import default_store

__all__ = ["guard_collectives", "rank_zero_first", "refuse_in_rank_zero_section"]


@final
class _Turn(threading.local):
    """The block of `rank_zero_first()` that this thread is in, as the rank that goes first.

    Attributes:
        pid: of the process that is in it: a forked one is not.
        is_local: whether only the ranks of this node wait for it.
    """

    pid = 0
    is_local = False


_turn = _Turn()


@contextmanager
def guard_collectives(*, is_local: bool) -> Iterator[None]:
    """Be the rank that goes first in the block: its collectives are refused, torch's own too."""
    before = (_turn.pid, _turn.is_local)
    _turn.pid, _turn.is_local = os.getpid(), is_local
    try:
        with intercepted(_refuse):
            yield
    finally:
        _turn.pid, _turn.is_local = before


def refuse_in_rank_zero_section(call: str, group_size: int | None) -> None:
    """Make sure that the ranks of a collective can come to it.

    Args:
        call: the collective, for the reader.
        group_size: how many ranks it is of; None for all.

    Raises:
        LifecycleError: in a function that only rank zero runs, and in a block that it runs before the others.
    """
    if is_in_rank_zero_section():
        raise LifecycleError(
            call=call,
            state="in a function that only rank zero runs",
            needed="every rank",
            remedy="call it outside of what is decorated with rank_zero_only.",
        )
    if _turn.pid != os.getpid():
        return
    # Where only a node's ranks wait, those that go first on their nodes may have a group of their own.
    if not _turn.is_local or group_size is None or group_size == dist.get_world_size():
        raise LifecycleError(
            call=call,
            state="in the block of rank_zero_first(), which the other ranks wait for",
            needed="every rank",
            remedy="call it before or after that block.",
        )


def _refuse(call: Call) -> None:
    refuse_in_rank_zero_section(f"{call.what} {call.where}", call.group.size())


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
    endpoint = default_store() if store is None else store
    turn = endpoint.add(f"rank_zero_first/{scope}/turns of {dist.get_rank()}", 1)  # as many on every rank
    key = f"rank_zero_first/{scope}/{turn}"
    if is_first:
        with _publish_outcome(endpoint, key), guard_collectives(is_local=local):
            yield
    else:
        _wait_for_outcome(endpoint, key, timeout)
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
def _publish_outcome(store: dist.Store, key: str) -> Iterator[None]:
    rank = dist.get_rank()
    try:
        yield
    except BaseException as error:
        failure = f"{rank} {type(error).__name__}: {text_of(error)}"
        ddp_options = failure.encode(errors="backslashreplace").decode()  # a file's name may be no UTF-8
        with suppress(Exception):  # a store that is gone, where nobody waits any more
            store.set(key, ddp_options)
        raise
    store.set(key, _DONE)


def _wait_for_outcome(store: dist.Store, key: str, timeout: timedelta) -> None:
    store.wait([key], timeout)
    outcome = store.get(key).decode("utf-8", "replace")
    if outcome != _DONE:
        rank, _, failure = outcome.partition(" ")
        raise RankZeroFailedError(global_rank=int(rank), failure=failure)

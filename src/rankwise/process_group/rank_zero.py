"""`rank_zero_first`, and the guard that raises for collectives that only rank zero would call."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import final

import torch.distributed as dist

from rankwise.errors import InvalidArgumentError, LifecycleError, RankZeroFailedError, text_of
from rankwise.process_group.after_failure import refuse_after_failure
from rankwise.process_group.collectives import is_distributed
from rankwise.process_group.interception import intercepted
from rankwise.ranks import RankInfo, is_in_rank_zero_section
from rankwise.stores.tcp import default_store
from rankwise.stores.values import decoded

_TIMEOUT = timedelta(days=7)  # a download may take hours; the launcher ends the job when a rank dies
_DONE = "done"


@final
class _FirstBlock(threading.local):
    """The block of `rank_zero_first()` that this thread runs first: a context would outlive it in a task."""

    pid = 0  # of the process that runs it; a forked process does not
    is_local = False  # whether only the ranks of this node wait for it


_first_block = _FirstBlock()


@contextmanager
def rank_zero_first(
    local: bool = False,
    *,
    ranks: RankInfo | None = None,
    store: dist.Store | None = None,
    timeout: timedelta = _TIMEOUT,
) -> Iterator[None]:
    """Run the block on rank zero first, then on all other ranks; without a process group, at once.

    Collective: every rank must enter it, in the same order. The other ranks wait in the store, so rank zero
    may take longer than the group's timeout. Rank zero must not call collectives in the block.

    Args:
        local: whether local rank 0 of each node runs the block first, instead of the job's rank 0.
        ranks: this process's ranks; required with `local`.
        store: where to wait; the process group's own by default.
        timeout: how long the other ranks wait at most.

    Raises:
        RankZeroFailedError: on the other ranks, when the block failed on rank zero; has the exception's text.
        InvalidArgumentError: with `local` and no `ranks`.
        LifecycleError: for a collective in the block, on the rank that runs it first; and in hooks after a
            failure on this rank.
        torch.distributed.DistStoreError: after `timeout`.

    Example:
        >>> with rank_zero_first():
        ...     path = "a file that is downloaded once"
    """
    if not is_distributed() or (ranks is not None and ranks.world_size == 1):
        yield
        return
    refuse_after_failure("rank_zero_first()")
    is_first, scope = _order(local, ranks)
    store = default_store() if store is None else store
    block = store.add(f"rank_zero_first/{scope}/blocks of {dist.get_rank()}", 1)  # the same on every rank
    key = f"rank_zero_first/{scope}/{block}"
    if is_first:
        with _publish_outcome(store, key, dist.get_rank()), _refuse_collectives(is_local=local):
            yield
    else:
        _wait_for_outcome(store, key, timeout)
        yield


@contextmanager
def awaited_between_jobs(store: dist.Store, global_rank: int, timeout: timedelta) -> Iterator[None]:
    """Enter the block on global rank 0 at once, on the other ranks when it has ended there.

    For ranks without a process group. Rank 0 waits for none, and needs no store.

    Raises:
        RankZeroFailedError: on the other ranks, when the block failed on rank zero.
        torch.distributed.DistStoreError: after `timeout`.
    """
    count = f"rank_zero_first/blocks of {global_rank}"
    if global_rank != 0:
        _wait_for_outcome(store, f"rank_zero_first/{store.add(count, 1)}", timeout)
        yield
        return
    block = 0
    with suppress(Exception):  # a store that has ended: then no rank waits
        block = store.add(count, 1)
    with _publish_outcome(store, f"rank_zero_first/{block}", global_rank):
        yield


def _order(local: bool, ranks: RankInfo | None) -> tuple[bool, str]:
    """Return whether this rank runs the block first, and a name for the ranks that wait for the same one."""
    if not local:
        return dist.get_rank() == 0, "job"
    if ranks is None:
        raise InvalidArgumentError(
            argument="ranks",
            value=None,
            expected="a RankInfo with local=True: it has the ranks that share a node",
        )
    return ranks.local_rank == 0, f"node{ranks.node_rank}"


@contextmanager
def _publish_outcome(store: dist.Store, key: str, rank: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        failure = f"{rank} {type(error).__name__}: {text_of(error)}"
        encodable = failure.encode(errors="backslashreplace").decode()  # it may name a file that is not UTF-8
        with suppress(Exception):  # a store that has ended: then no rank waits
            store.set(key, encodable)
        raise
    store.set(key, _DONE)


def _wait_for_outcome(store: dist.Store, key: str, timeout: timedelta) -> None:
    store.wait([key], timeout)
    outcome = store.get(key).decode("utf-8", "replace")
    if outcome != _DONE:
        rank, _, failure = outcome.partition(" ")
        source = f"the rank in {key!r} of the job's store"
        raise RankZeroFailedError(global_rank=decoded(int, rank, source), failure=failure)


@contextmanager
def _refuse_collectives(*, is_local: bool) -> Iterator[None]:
    """Raise for this rank's collectives in the block, torch's own included."""
    before = (_first_block.pid, _first_block.is_local)
    _first_block.pid, _first_block.is_local = os.getpid(), is_local
    try:
        with intercepted(lambda call: refuse_lone_call(f"{call.what} {call.where}", call.group.size())):
            yield
    finally:
        _first_block.pid, _first_block.is_local = before


def refuse_lone_call(call: str, group_size: int | None) -> None:
    """Raise if only some ranks can call a collective of `group_size` ranks (None: of all) here.

    That is so in code that only rank zero runs, and in the hooks that follow a failure on this rank.
    """
    refuse_after_failure(call)
    if is_in_rank_zero_section():
        raise LifecycleError(
            call=call,
            state="in a function that only rank zero runs",
            needed="every rank",
            remedy="call it outside of what is decorated with rank_zero_only.",
        )
    if _first_block.pid != os.getpid():
        return
    # Where only a node's ranks wait, the first ranks of all nodes may use a group of their own.
    if not _first_block.is_local or group_size is None or group_size == dist.get_world_size():
        raise LifecycleError(
            call=call,
            state="in the block of rank_zero_first(), which the other ranks wait for",
            needed="every rank",
            remedy="call it before or after that block.",
        )

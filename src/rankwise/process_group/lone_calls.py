"""Provide `rank_zero_first`, and refuse collectives in what only this rank runs.

That is the block of `rank_zero_first` on the rank that runs it first, and hooks after a failure on this rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import final

import torch.distributed as dist

from rankwise.errors import InvalidArgumentError, LifecycleError, RankZeroFailedError, text_of
from rankwise.process_group.collectives import is_distributed
from rankwise.process_group.interception import intercepted
from rankwise.ranks import RankInfo, is_in_rank_zero_section
from rankwise.stores.tcp import default_store
from rankwise.stores.values import decoded

_TIMEOUT = timedelta(days=7)  # a download may take hours; the launcher ends the job when a rank dies
_DONE = "done"
_REMEDY = (
    "call no collectives in on_exception and teardown after a failure; save_checkpoint(path) works there: it "
    "writes this rank's own state."
)


@final
class _LoneBlocks(threading.local):
    """What this thread, but not its forks, runs while other ranks do not."""

    # Not a ContextVar: it would outlive the block in an asyncio task.
    first_pid = 0  # of the process that runs the block of `rank_zero_first()` first
    is_first_local = False  # whether only the ranks of this node wait for that block
    failed_pid = 0  # of the process in hooks after a failure
    was_in_optimizer_step = False  # which the failure has cut: no state may be saved


_blocks = _LoneBlocks()


@contextmanager
def _running(refuse: Callable[[str, int], None], **facts: int) -> Iterator[None]:
    """Note what this thread runs in the block; call `refuse` for its collectives, torch's own included."""
    before = {name: getattr(_blocks, name) for name in facts}
    vars(_blocks).update(facts)
    try:
        with intercepted(lambda call: refuse(f"{call.what} {call.where}", call.group.size())):
            yield
    finally:
        vars(_blocks).update(before)


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
    is_first, scope = dist.get_rank() == 0, "job"
    if local:
        if ranks is None:
            expected = "a RankInfo with local=True: it has the ranks that share a node"
            raise InvalidArgumentError(argument="ranks", value=None, expected=expected)
        is_first, scope = ranks.local_rank == 0, f"node{ranks.node_rank}"
    store = default_store() if store is None else store
    block = store.add(f"rank_zero_first/{scope}/blocks of {dist.get_rank()}", 1)  # the same on every rank
    key = f"rank_zero_first/{scope}/{block}"
    if is_first:
        running = _running(refuse_lone_call, first_pid=os.getpid(), is_first_local=local)
        with _publish_outcome(store, key, dist.get_rank()), running:
            yield
    else:
        _wait_for_outcome(store, key, timeout)
        yield


@contextmanager
def awaited_between_jobs(store: dist.Store, global_rank: int, timeout: timedelta) -> Iterator[None]:
    """Enter the block on global rank 0 at once, on the other ranks when it has ended there.

    For ranks without a process group; raises as `rank_zero_first`. Rank 0 waits for none, and needs no store.
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


def refuse_lone_call(call: str, group_size: int | None) -> None:
    """Raise if only some ranks can call a collective of `group_size` ranks (None: of all) here."""
    refuse_after_failure(call)
    if is_in_rank_zero_section():
        remedy = "call it outside of what is decorated with rank_zero_only."
        raise _lone_call_error(call, "in a function that only rank zero runs", remedy)
    if _blocks.first_pid != os.getpid():
        return
    # Where only a node's ranks wait, the first ranks of all nodes may use a group of their own.
    if not _blocks.is_first_local or group_size is None or group_size == dist.get_world_size():
        state = "in the block of rank_zero_first(), which the other ranks wait for"
        raise _lone_call_error(call, state, "call it before or after that block.")


def _lone_call_error(call: str, state: str, remedy: str) -> LifecycleError:
    return LifecycleError(call=call, state=state, needed="every rank", remedy=remedy)


def is_after_failure() -> bool:
    """Return whether this thread runs hooks after a failure on this rank."""
    return _blocks.failed_pid == os.getpid()


def collectives_refused_after_failure(*, was_in_optimizer_step: bool = False) -> AbstractContextManager[None]:
    """Return the block of hooks after a failure on this rank, in which its collectives raise.

    Enter the block in the thread that makes it.
    """
    facts = {"failed_pid": os.getpid(), "was_in_optimizer_step": was_in_optimizer_step}
    return _running(lambda call, group_size: refuse_after_failure(call), **facts)


def refuse_after_failure(call: str, remedy: str = _REMEDY) -> None:
    """Raise LifecycleError if this thread runs hooks after a failure on this rank."""
    if is_after_failure():
        raise _lone_call_error(call, "in a hook after a failure on this rank", remedy)


def refuse_partly_updated(call: str) -> None:
    """Raise LifecycleError if another rank's failure has stopped this rank within an optimizer step."""
    if _blocks.was_in_optimizer_step:
        needed = "weights that are not partly updated"
        remedy = "the rank that failed first can save: call it in on_exception on every rank."
        raise LifecycleError(call, "stopped within an optimizer step", needed, remedy)

"""Refuse collectives in what only rank zero runs: the other ranks would never come."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from typing_extensions import final

from rankwise.errors import LifecycleError
from rankwise.process_group.interception import Call, intercepted
from rankwise.ranks import is_in_rank_zero_section

__all__ = ["going_first", "refuse_in_rank_zero_section"]


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
def going_first(*, is_local: bool) -> Iterator[None]:
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

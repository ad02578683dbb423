"""Refuse collectives on a rank that has failed: the other ranks do not take part in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from rankwise.errors import LifecycleError
from rankwise.process_group.interception import intercepted

_STATE = "in a hook after a failure on this rank"
_REMEDY = (
    "call no collectives in on_exception and teardown after a failure; save_checkpoint(path) works there: it "
    "writes this rank's own state."
)


@final
class _Failed(threading.local):
    """Whether this thread runs hooks after a failure; false in a process that it forks."""

    pid = 0
    was_in_optimizer_step = False


_failed = _Failed()


def is_after_failure() -> bool:
    """Return whether this thread runs hooks after a failure on this rank."""
    return _failed.pid == os.getpid()


@contextmanager
def collectives_refused_after_failure(*, was_in_optimizer_step: bool = False) -> Iterator[None]:
    """Raise for the collectives of this thread in the block, torch's own included.

    `was_in_optimizer_step` is whether this rank was stopped within one, so that no state may be saved.
    """
    before = (_failed.pid, _failed.was_in_optimizer_step)
    _failed.pid, _failed.was_in_optimizer_step = os.getpid(), was_in_optimizer_step
    try:
        with intercepted(lambda call: refuse_after_failure(f"{call.what} {call.where}")):
            yield
    finally:
        _failed.pid, _failed.was_in_optimizer_step = before


def refuse_after_failure(call: str, *, needed: str = "every rank", remedy: str = _REMEDY) -> None:
    """Raise LifecycleError if this thread runs hooks after a failure on this rank."""
    if _failed.pid == os.getpid():
        raise LifecycleError(call=call, state=_STATE, needed=needed, remedy=remedy)


def refuse_partly_updated(call: str) -> None:
    """Raise LifecycleError if another rank's failure has stopped this rank within an optimizer step."""
    if is_after_failure() and _failed.was_in_optimizer_step:
        raise LifecycleError(
            call=call,
            state="stopped within an optimizer step",
            needed="weights that are not partly updated",
            remedy="the rank that failed first can save: call it in on_exception on every rank.",
        )

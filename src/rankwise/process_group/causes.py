"""What an exception says, and what led to it, whatever class it is of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["chain_of", "text_of", "work_begins"]

_handled_before: ContextVar[BaseException | None] = ContextVar("handled_before", default=None)


@contextmanager
def work_begins() -> Iterator[None]:
    """Run a rank's work in the block: what its caller is handling has led to none of its failures.

    Python links whatever is raised within to that, in a forked process, too.
    """
    token = _handled_before.set(sys.exc_info()[1])
    try:
        yield
    finally:
        _handled_before.reset(token)


def text_of(error: BaseException) -> str:
    """Return an exception's text, or that it has none: `__str__` is anybody's code."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  whatever that code raises
        return "(its text could not be had)"


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception, what it was raised from or in handling what, and so on: a traceback's parts."""
    chain: dict[int, BaseException] = {}
    link: BaseException | None = error
    handled_before = _handled_before.get()
    while link is not None and id(link) not in chain:  # which may lead in a circle
        chain[id(link)] = link
        is_apart = link.__suppress_context__ or link.__context__ is handled_before
        context = None if is_apart else link.__context__
        link = context if link.__cause__ is None else link.__cause__
    return list(chain.values())

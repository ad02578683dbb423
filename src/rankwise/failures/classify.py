"""Exceptions: their text and chain, when they were raised, and which ones another failure caused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["chain_of", "mark_propagated", "is_propagated", "text_of", "start_exception_chain"]

_handled_before: ContextVar[BaseException | None] = ContextVar("handled_before", default=None)


@contextmanager
def start_exception_chain() -> Iterator[None]:
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


E = TypeVar("E", bound=BaseException)
_MARK = "_rankwise_echo"


def mark_propagated(error: E) -> E:
    """Mark an exception that came from another rank, where it is about to be raised; return it."""
    setattr(error, _MARK, True)
    return error


def is_propagated(error: BaseException) -> bool:
    """Return whether another rank raised this first."""
    return bool(vars(error).get(_MARK, False))  # and not by an attribute, which may be anybody's code

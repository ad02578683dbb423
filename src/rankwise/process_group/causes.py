"""What an exception says, and what led to it, whatever class it is of."""

from __future__ import annotations

__all__ = ["chain_of", "text_of"]


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
    while link is not None and id(link) not in chain:  # which may lead in a circle
        chain[id(link)] = link
        context = None if link.__suppress_context__ else link.__context__
        link = context if link.__cause__ is None else link.__cause__
    return list(chain.values())

"""Exceptions that a rank raises because another one told it to: not its own failure."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["echo_of", "is_echo"]

E = TypeVar("E", bound=BaseException)
_MARK = "_rankwise_echo"


def echo_of(error: E) -> E:
    """Mark an exception that came from another rank, where it is about to be raised; return it."""
    setattr(error, _MARK, True)
    return error


def is_echo(error: BaseException) -> bool:
    """Return whether another rank raised this first."""
    return bool(vars(error).get(_MARK, False))  # and not by an attribute, which may be anybody's code

"""What a forked child does at once: let go of our channels."""

from __future__ import annotations

import functools
import os
from typing import Protocol


class Closable(Protocol):
    """Something with a descriptor that a child must not keep."""

    def close(self) -> None:
        """Close it."""


_closed_in_child: set[Closable] = set()


def close_in_child(*descriptors: Closable) -> None:
    """Close these in every process forked from now on, so that end-of-file means what it says."""
    _hook()
    _closed_in_child.update(descriptors)


def forget(*descriptors: Closable) -> None:
    """Stop closing these: they are closed here."""
    _closed_in_child.difference_update(descriptors)


@functools.cache  # a hook stays, in children too
def _hook() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for descriptor in _closed_in_child:
        descriptor.close()
    _closed_in_child.clear()

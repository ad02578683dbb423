"""How often this process has launched: a script that is run again comes to each of these launches again."""

from __future__ import annotations

__all__ = ["launches_begun", "note_launch"]

_begun = 0


def launches_begun() -> int:
    """Return how many launches have begun in this process, whatever became of them."""
    return _begun


def note_launch() -> int:
    """Note that one more begins; return how many did before it."""
    global _begun
    _begun += 1
    return _begun - 1

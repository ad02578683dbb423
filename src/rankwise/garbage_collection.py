"""Do without garbage collections for a moment, and move objects to the oldest generation without one."""

from __future__ import annotations

import gc
from typing import final


@final
class CollectionsPaused:
    """A block without garbage collections, in any thread. Not by contextlib, which would take time to import.

    Where blocks of two threads overlap, collections may begin again at the end of the first.
    """

    def __enter__(self) -> None:
        self._is_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *details: object) -> None:
        if self._is_enabled:
            gc.enable()


def move_to_oldest_generation() -> None:
    """Move all objects to the oldest generation, as collections move what is in use, but without a search."""
    if gc.get_freeze_count() == 0:  # a program may have frozen its objects itself
        gc.freeze()
        gc.unfreeze()

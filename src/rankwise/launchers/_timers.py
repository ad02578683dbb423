"""What the supervisor does when a time has come: one deadline, and looks at the ranks now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import final


class Watch(Protocol):
    """Something that looks at the ranks now and then."""

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for never."""

    def look(self) -> None:
        """Look, if it is time to."""


@final
class Timers:
    """One deadline, which replaces the one before, and the looks of some watches."""

    def __init__(self, *watches: Watch) -> None:
        self._watches = watches
        self._deadline: tuple[float, Callable[[], None]] | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a deadline."""
        return self._deadline is not None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something so many seconds from now, instead of what was to be done before."""
        self._deadline = (time.monotonic() + seconds, action)

    def clear(self) -> None:
        """Forget the deadline."""
        self._deadline = None

    def time_left(self) -> float | None:
        """Return the seconds until something is due; None for never."""
        times = [left for watch in self._watches if (left := watch.time_left()) is not None]
        if self._deadline is not None:
            times.append(max(0.0, self._deadline[0] - time.monotonic()))
        return min(times, default=None)

    def run(self) -> None:
        """Do what is due."""
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            action = self._deadline[1]
            self._deadline = None
            action()
        for watch in self._watches:
            watch.look()

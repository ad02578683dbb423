"""What the supervisor does when a time has come: one deadline, and a look at the ranks now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import final

from rankwise.launchers._stalls import StallWatch


@final
class Timers:
    """One deadline, which replaces the one before, and the looks of a `StallWatch`."""

    def __init__(self, stalls: StallWatch) -> None:
        self._stalls = stalls
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
        until_look = self._stalls.time_left()
        if self._deadline is None:
            return until_look
        until_deadline = max(0.0, self._deadline[0] - time.monotonic())
        return until_deadline if until_look is None else min(until_deadline, until_look)

    def run(self) -> None:
        """Do what is due."""
        if self._deadline is not None and time.monotonic() >= self._deadline[0]:
            action = self._deadline[1]
            self._deadline = None
            action()
        self._stalls.look()

"""Say which rank holds the others up, while it does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from typing_extensions import final

from rankwise._say import say
from rankwise.launchers._member import Member

# How many looks there are in the time after which a rank is reported.
_LOOKS = 4


@final
class StallWatch:
    """Look at the ranks' pulses now and then; report who lags on stderr, again and again while it does.

    Args:
        members: all local ranks; the list is the supervisor's, and grows.
        warn_after_s: after how long in one phase a rank lags, if others wait meanwhile.
    """

    def __init__(self, members: Sequence[Member], warn_after_s: float) -> None:
        self._members = members
        self._warn_after_s = warn_after_s
        self._next_look_s = time.monotonic() + warn_after_s / _LOOKS
        self._reported: dict[int, float] = {}
        self._leaving_since_s: float | None = None

    def expect_exit(self) -> None:
        """Report, from now on, who has not left yet: the work is done, and the main process waits."""
        if self._leaving_since_s is None:
            self._leaving_since_s = time.monotonic()

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for a rank that is alone."""
        return None if len(self._members) < 2 else max(0.0, self._next_look_s - time.monotonic())

    def look(self) -> None:
        """Report, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._warn_after_s / _LOOKS
        if self._leaving_since_s is not None:
            if now_s - self._leaving_since_s >= self._warn_after_s:
                self._report(_still_there(self._members), "The main process waits for it to leave.")
            return
        lagging = laggards(self._members, self._warn_after_s)
        others = [other for other in self._members if other not in lagging]
        self._report(lagging, f"The others wait: {joined(others)}.")

    def _report(self, members: Sequence[Member], who_waits: str) -> None:
        now_s = time.monotonic()
        for member in members:
            rank = member.ranks.global_rank
            if now_s - self._reported.get(rank, 0.0) >= self._warn_after_s:
                self._reported[rank] = now_s
                say(f"rankwise: {member.whereabouts()}. {who_waits}\n")


def laggards(members: Sequence[Member], after_s: float) -> list[Member]:
    """Return the ranks that have been in one phase for that long, while others wait or are further on."""
    pulses = [(member, member.pulse.read()) for member in members if not member.has_ended]
    return [
        member
        for member, pulse in pulses
        if not pulse.waits
        and pulse.seconds_ago() > after_s
        and any(other.waits_for(pulse) for _, other in pulses)
    ]


def _still_there(members: Sequence[Member]) -> list[Member]:
    return [member for member in members if member.process is not None and not member.has_ended]


def joined(members: Iterable[Member]) -> str:
    """Return where ranks are, in one line."""
    return "; ".join(member.whereabouts() for member in members)

"""Say which rank holds the others up, while it does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from typing_extensions import final

from rankwise.launchers._member import Member
from rankwise.launchers._say import say

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

    def time_left(self) -> float | None:
        """Return the seconds until the next look; None for a rank that is alone."""
        return None if len(self._members) < 2 else max(0.0, self._next_look_s - time.monotonic())

    def look(self) -> None:
        """Report, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + self._warn_after_s / _LOOKS
        lagging = laggards(self._members, self._warn_after_s)
        for member in lagging:
            rank = member.ranks.global_rank
            if now_s - self._reported.get(rank, 0.0) >= self._warn_after_s:
                self._reported[rank] = now_s
                others = [other for other in self._members if other not in lagging]
                say(f"rankwise: {member.whereabouts()}. The others wait: {joined(others)}.\n")


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


def joined(members: Iterable[Member]) -> str:
    """Return where ranks are, in one line."""
    return "; ".join(member.whereabouts() for member in members)

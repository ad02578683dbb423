"""How much is measured: the whole of it, or a quick run that shows that it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How often the contenders take turns.

    Attributes:
        rounds: rounds of measurements that take seconds.
        short_rounds: rounds of measurements that take milliseconds.
        programs: rounds of measurements that start programs.
        is_quick: whether jobs are as small as they can be: the figures say nothing then.
    """

    rounds: int
    short_rounds: int
    programs: int
    is_quick: bool = False

    @classmethod
    def of_rounds(cls, rounds: int) -> Sampling:
        """Return a whole measurement."""
        return cls(rounds, 3 * rounds, rounds)


QUICK = Sampling(rounds=2, short_rounds=2, programs=1, is_quick=True)

"""How much is measured: the whole of it, or a quick run that shows that it works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True)
class Sampling:
    """How often the contenders take turns.

    Attributes:
        rounds: rounds of measurements on ranks that run already.
        programs: rounds of measurements that start programs.
        others: in how many of these the contenders take part that come after raw torch and rankwise.
        is_quick: whether jobs are as small as they can be: the figures say nothing then.
    """

    rounds: int
    programs: int
    others: int
    is_quick: bool = False

    @classmethod
    def of_rounds(cls, rounds: int) -> Sampling:
        """Return a whole measurement."""
        return cls(rounds, rounds, max(1, rounds // 5))

    def rounds_of(self, contenders: Iterable[str], always: int = 2) -> dict[str, int]:
        """Return the rounds of contenders that start programs, after those that `always` take part."""
        return dict.fromkeys(islice(contenders, always, None), self.others)


QUICK = Sampling(rounds=2, programs=1, others=1, is_quick=True)

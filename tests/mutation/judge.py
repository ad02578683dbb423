"""Find the test that fails with a mutant: the nearest and shortest tests first."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tests.mutation.mutants import Mutant
from tests.mutation.reach import Record
from tests.mutation.runner import Runner
from tests.mutation.worker import Outcome

BUDGET_S = 240.0
"""The processor time after which no further test is tried with a mutant."""
PORTIONS_S = (20.0, 100.0, 500.0)
"""Tests run in portions, as collecting all takes long: those that take 20 s, then more until 100 s, 500 s."""
SLACK_S = 120.0
"""What a test, or what its file's tests share, may take beside ten times its usual time before it hangs."""


@dataclass(frozen=True)
class Verdict:
    """What the tests said about a mutant: `killer` is the test that failed, None if the mutant survives."""

    mutant: Mutant
    killer: str | None
    has_hung: bool
    reached: int
    tried: int
    cpu_s: float

    def __str__(self) -> str:
        if self.killer is not None:
            result = f"{'hangs in' if self.has_hung else 'killed by'} {self.killer}"
        elif self.reached:
            result = f"SURVIVES {self.tried} of the {self.reached} tests that reach it"
        else:
            result = "SURVIVES: no test reaches it"
        return f"{self.mutant}\n    {result} ({self.cpu_s:.1f} s)"


class Judge:
    """Tries tests with mutants, by the records of which tests reach which lines."""

    def __init__(
        self, records: Iterable[Record], *, budget_s: float = BUDGET_S, slack_s: float = SLACK_S
    ) -> None:
        self._records = list(records)
        self._budget_s = budget_s
        self._slack_s = slack_s

    def __call__(self, runner: Runner, mutant: Mutant) -> Verdict:
        """Run tests until one fails. A process test that fails has to fail twice."""
        reaching = self.tests(mutant)
        tried, cpu_s = 0, 0.0
        left = list(portions(reaching))
        while left and cpu_s < self._budget_s:
            tests = left.pop(0)
            outcome = self._run(runner, tests, mutant, self._budget_s - cpu_s)
            cpu_s += outcome.cpu_s
            tried += len(outcome.durations)
            killer = outcome.hung or next(iter(outcome.failed), None)
            if killer is None:
                continue
            if killer.startswith("tests/process/") and outcome.hung is None:
                again = self._run(runner, [killer], mutant, self._budget_s)
                cpu_s += again.cpu_s
                if killer in again.durations:
                    left.insert(0, tests[tests.index(killer) + 1 :])
                    continue
            return Verdict(mutant, killer, outcome.hung is not None, len(reaching), tried + 1, cpu_s)
        return Verdict(mutant, None, False, len(reaching), tried, cpu_s)

    def _run(self, runner: Runner, tests: Sequence[str], mutant: Mutant, budget_s: float) -> Outcome:
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        limits_s = {test: self._slack_s + 10 * seconds for test, seconds in self.tests(mutant).items()}
        return runner.run(list(files), tests, mutant=mutant, limits_s=limits_s, budget_s=budget_s)

    def tests(self, mutant: Mutant) -> dict[str, float]:
        """Return the tests that reach a mutant with their seconds, in the order in which they are tried.

        Within a class of nearness, each file's shortest test comes first, then each file's second.
        """
        found: list[tuple[int, int, float, str]] = []
        for record in self._records:
            tests = sorted((record.durations[test], test) for test in record.reaching(mutant))
            nearness = _nearness(record.file, mutant.path)
            found += [(nearness, number, seconds, test) for number, (seconds, test) in enumerate(tests)]
        return {test: seconds for _, _, seconds, test in sorted(found)}


def portions(tests: Mapping[str, float]) -> Iterator[list[str]]:
    """Divide tests, with their seconds, into those that run together; leave out the last of too many."""
    ends = list(itertools.accumulate(tests.values()))
    counts = [max(1, bisect.bisect_right(ends, limit_s)) for limit_s in PORTIONS_S]
    for begin, end in itertools.pairwise((0, *counts)):
        if portion := list(tests)[begin:end]:
            yield portion


def _nearness(test_file: str, source_file: str) -> int:
    """Return 0 for the tests of a source file, 1 of its folder, 2 for other quick ones, 3 for the rest."""
    test, source = PurePath(test_file), PurePath(source_file)
    is_quick = test_file.startswith(("tests/unit/", "tests/contract/"))
    if not is_quick:
        return 3
    if test.parent.name != source.parent.name:
        return 2
    return 0 if test.stem.startswith(f"test_{source.stem}") else 1

"""Find the test that fails with a mutant: the nearest and shortest tests first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tests.mutation.mutants import Mutant
from tests.mutation.reach import Record
from tests.mutation.runner import Runner
from tests.mutation.worker import COLLECTING, Outcome

BUDGET_S = 90.0
"""How long the tests that are tried with one mutant take together, without it."""
SLACK_S = 30.0
"""What a test may take in addition to ten times its usual time before it counts as hanging."""


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
        tests = self.affordable(reaching)
        left, cpu_s = list(tests), 0.0
        while left:
            outcome = self._run(runner, left, mutant)
            cpu_s += outcome.cpu_s
            killer = outcome.hung or next(iter(outcome.failed), None)
            if killer is None:
                break
            if killer == COLLECTING or outcome.hung or killer.startswith("tests/unit/"):
                return Verdict(mutant, killer, outcome.hung is not None, len(reaching), len(tests), cpu_s)
            again = self._run(runner, [killer], mutant)
            cpu_s += again.cpu_s
            if again.failed or again.hung:
                return Verdict(mutant, killer, again.hung is not None, len(reaching), len(tests), cpu_s)
            left = left[left.index(killer) + 1 :]
        return Verdict(mutant, None, False, len(reaching), len(tests), cpu_s)

    def _run(self, runner: Runner, tests: Sequence[str], mutant: Mutant) -> Outcome:
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        limits_s = {test: self._slack_s + 10 * seconds for test, seconds in self.tests(mutant).items()}
        return runner.run(list(files), tests, mutant=mutant, limits_s=limits_s)

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

    def affordable(self, tests: dict[str, float]) -> list[str]:
        """Return as many tests as fit into the budget, at least one."""
        until = itertools.accumulate(tests.values())
        return [
            test
            for number, (test, seconds) in enumerate(zip(tests, until, strict=True))
            if number == 0 or seconds <= self._budget_s
        ]


def _nearness(test_file: str, source_file: str) -> int:
    """Return 0 for the tests of a source file, 1 of its folder, 2 for other quick ones, 3 for the rest."""
    test, source = PurePath(test_file), PurePath(source_file)
    is_quick = test_file.startswith(("tests/unit/", "tests/contract/"))
    if not is_quick:
        return 3
    if test.parent.name != source.parent.name:
        return 2
    return 0 if test.stem.startswith(f"test_{source.stem}") else 1

"""Judge the mutants that are drawn of a project, and report which of them survive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.judge import Judge, Verdict
from tests.mutation.mutants import draw
from tests.mutation.reach import records_of
from tests.mutation.runner import at_once, runners

FOLDERS = ("tests/unit", "tests/contract", "tests/process")
"""The folders of the tests that run; others would take more time than they are worth here."""


@dataclass(frozen=True)
class Report:
    """The verdicts on all mutants, and the tests that fail without a mutant."""

    verdicts: Sequence[Verdict]
    failing: Sequence[str]

    @property
    def survivors(self) -> list[Verdict]:
        """The mutants that no test has killed."""
        return [verdict for verdict in self.verdicts if verdict.killer is None]

    @property
    def rate(self) -> float:
        """The part of the mutants that was killed."""
        return 1 - len(self.survivors) / len(self.verdicts) if self.verdicts else 1.0

    def __str__(self) -> str:
        survivors = [f"{verdict}\n{verdict.mutant.diff}" for verdict in self.survivors]
        failing = [f"fails without a mutant: {test}" for test in self.failing]
        cpu_s = sum(verdict.cpu_s for verdict in self.verdicts) / max(1, len(self.verdicts))
        killed = len(self.verdicts) - len(self.survivors)
        rate = f"{killed} of {len(self.verdicts)} mutants killed ({self.rate:.0%})"
        return "\n".join([*survivors, *failing, f"{rate}, {cpu_s:.1f} s of processor time each"])


def judge_mutants(
    project: Path, places: Sequence[str], tests: Iterable[str], *, seed: int, count: int, jobs: int = 2
) -> Report:
    """Draw mutants, and run those of `tests`, folders or files, that reach them; print each verdict."""
    mutants = draw(project, places, seed, count)
    with runners(project, jobs) as ready:
        records = records_of(project, _test_files(project, tests), ready)
        verdicts = []
        for number, verdict in enumerate(at_once(ready, Judge(records), mutants), 1):
            print(f"[{number}/{len(mutants)}] {verdict}", flush=True)
            verdicts.append(verdict)
    return Report(verdicts, [test for record in records for test in record.failed])


def _test_files(project: Path, places: Iterable[str]) -> list[str]:
    """Return the test files of folders, and files that are given as such."""
    found: list[Path] = []
    for path in (project / place for place in places):
        found += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [str(path.relative_to(project)) for path in found]

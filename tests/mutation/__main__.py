"""Run the mutation tester from the command line: `python -m tests.mutation`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.judge import Judge, Verdict, files_of_tests
from tests.mutation.mutants import draw
from tests.mutation.reach import records_of
from tests.mutation.runner import at_once, runners

PROJECT = Path(__file__).parents[2]
FOLDERS = ("tests/unit", "tests/contract", "tests/process")


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
    project: Path,
    places: Sequence[str],
    folders: Sequence[str],
    *,
    seed: int = 0,
    count: int = 100,
    jobs: int = 2,
) -> Report:
    """Draw mutants, and run the tests of `folders` that reach them."""
    mutants = draw(project, places, seed, count)
    with runners(project, jobs) as ready:
        records = records_of(project, files_of_tests(project, folders), ready)
        judge = Judge(records)
        verdicts = []
        for number, verdict in enumerate(at_once(ready, judge, mutants), 1):
            print(f"[{number}/{len(mutants)}] {verdict}", flush=True)
            verdicts.append(verdict)
    return Report(verdicts, [test for record in records for test in record.failed])


def main() -> int:
    """Parse the command line; the exit code is 1 if a test fails without a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "places", nargs="*", default=["src/rankwise"], metavar="PATH", help="file, file:line or folder"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="of mutants (default: 100)")
    parser.add_argument(
        "--tests", nargs="+", default=FOLDERS, metavar="FOLDER", help=f"default: {' '.join(FOLDERS)}"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many tests run at once (default: 2)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the temporary folder
    report = judge_mutants(
        PROJECT, given.places, given.tests, seed=given.seed, count=given.count, jobs=given.jobs
    )
    print(f"\n{report}")
    return 1 if report.failing else 0


if __name__ == "__main__":
    sys.exit(main())

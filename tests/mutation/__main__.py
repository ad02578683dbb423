"""The command line of the mutation tester: `python -m tests.mutation`."""

import argparse
import signal
import sys
from pathlib import Path

from tests.mutation.report import FOLDERS, judge_mutants

PROJECT = Path(__file__).parents[2]


def main() -> int:
    """Parse the command line; the exit code is 1 if a test fails without a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    add = parser.add_argument
    add("places", nargs="*", default=["src/rankwise"], metavar="PATH", help="a folder, a file, or FILE:LINE")
    add("--seed", type=int, default=0)
    add("--count", type=int, default=100, help="how many mutants are drawn (default: 100)")
    add("--tests", nargs="+", default=FOLDERS, metavar="PATH", help=f"default: {' '.join(FOLDERS)}")
    add("-j", "--jobs", type=int, default=2, help="how many tests run at once (default: 2)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the temporary folder
    drawing = {"seed": given.seed, "count": given.count, "jobs": given.jobs}
    report = judge_mutants(PROJECT, given.places, given.tests, **drawing)
    print(f"\n{report}")
    return 1 if report.failing else 0


if __name__ == "__main__":
    sys.exit(main())

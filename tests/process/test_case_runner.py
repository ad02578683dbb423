"""The program that forks a process for each case: how cases end, and what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.case_runner import CaseRunner
from tests.process.helpers import combinations

CASES = """
import os, subprocess, sys
from tests.process.case_server import main

def show(*words):
    print(*words, sys.orig_argv[2:], os.environ.get("GIVEN"))

def fail():
    raise ValueError("of the case")

def leave():
    subprocess.Popen(["sleep", "60"], start_new_session=True)

if __name__ == "__main__":
    main(globals())
"""


def test_cases_are_as_scripts(tmp_path: Path) -> None:
    """A case has its command line, variables, streams and exit code; a process that it leaves is an error."""
    module = tmp_path / "cases.py"
    module.write_text(CASES)
    cases = CaseRunner(module, tmp_path)
    try:
        assert cases("show", "a", env={"GIVEN": "b"}).stdout == "a ['show', 'a'] b\n"
        assert [each.stdout for each in cases.on_each("show", [{"GIVEN": "0"}, {}])] == [
            "['show'] 0\n",
            "['show'] None\n",
        ]
        failed = cases("fail")
        assert failed.returncode == 1
        assert "ValueError: of the case" in failed.stderr
        with pytest.raises(AssertionError, match=r"left 1 processes behind:\n.*sleep 60"):
            cases("leave")
        assert cases("show").stdout == "['show'] None\n"  # of another program
    finally:
        cases.close()


def test_combinations_that_are_not_quick_are_marked() -> None:
    """Every combination is there once; the marker tells which ones run in the long series."""
    found = combinations("ab", "xy", quick=[("a", "x"), ("b", "y")])
    assert [each.id for each in found] == ["a-x", "a-y", "b-x", "b-y"]
    assert [bool(each.marks) for each in found] == [False, True, True, False]

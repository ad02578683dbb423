"""One program that launches many times, well and badly in turn, has no more of anything at the end."""

import json
import sys

import pytest

from tests.helpers.scripts import WITHOUT_COVERAGE, ScriptRunner
from tests.process.helpers import with_tests
from tests.process.many_launches import KINDS, Sample, growth

SERIES = 1008


def samples(run_script: ScriptRunner, *args: str, timeout: float) -> dict[str, list[Sample]]:
    """Run the program; return its samples by rank."""
    command = [sys.executable, "-m", "tests.process.many_launches", *args]
    result = run_script.command(command, env=with_tests(WITHOUT_COVERAGE), timeout=timeout)
    assert result.returncode == 0, result
    found: dict[str, list[Sample]] = {}
    for line in result.stdout.splitlines():
        held = json.loads(line)
        found.setdefault(held["rank"], []).append(held)
    return found


EXPECTED = {
    "killed": "WorkerKilledError",
    "exit": "WorkerExitedError",
    **dict.fromkeys(("refused", "few files", "other devices", "other rendezvous"), "LaunchRefusedError"),
    **dict.fromkeys(("exception", "not readable", "fit fails", "not picklable"), "WorkerRaisedError"),
}


def check(held: list[Sample]) -> None:
    """Compare the first sample with the last one, and the outcomes with what they should be."""
    assert growth(held[0], held[-1]) == []
    for outcome in held[-1]["outcomes"]:
        how, result = outcome.split(": ")
        assert result == EXPECTED.get(how, "good"), held[-1]["outcomes"]


def test_nothing_grows(run_script: ScriptRunner) -> None:
    """Without garbage collection, too, for what matters to others: descriptors, threads, processes, files."""
    for held in samples(run_script, "fork", "32", "16", "gc-off", timeout=60).values():
        check(held)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows_in_a_thousand_launches(kind: str, run_script: ScriptRunner) -> None:
    """With every start method."""
    every = 3 * len(KINDS[kind])
    for held in samples(run_script, kind, str(SERIES), str(every), timeout=3 * 3600).values():
        check(held)

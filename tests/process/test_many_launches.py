"""One program that launches many times, well and badly in turn, has no more of anything at the end."""

import json
import sys

import pytest

from tests.helpers.scripts import WITHOUT_COVERAGE, ScriptRunner
from tests.process.helpers import with_tests
from tests.process.many_launches import KINDS, Sample, growth

EXPECTED = {
    "killed": "WorkerKilledError",
    "exit": "WorkerExitedError",
    **dict.fromkeys(("refused", "few files", "other devices", "other rendezvous"), "LaunchRefusedError"),
    **dict.fromkeys(("exception", "not readable", "fit fails", "not picklable"), "WorkerRaisedError"),
}
pytestmark = [pytest.mark.soak, pytest.mark.timeout(6 * 3600)]


@pytest.mark.parametrize(
    ("arguments", "timeout_s"),
    [
        (["fork", "32", "16", "gc-off"], 60),
        *(pytest.param([kind, "1008", str(3 * len(KINDS[kind]))], 3 * 3600, id=kind) for kind in KINDS),
    ],
)
def test_nothing_grows(arguments: list[str], timeout_s: float, run_script: ScriptRunner) -> None:
    """The samples of each rank are equal, by every start method, and the outcomes are as they should be.

    Without garbage collection, too, for what matters to others: descriptors, threads, processes, files.
    """
    command = [sys.executable, "-m", "tests.process.many_launches", *arguments]
    result = run_script.command(command, env=with_tests(WITHOUT_COVERAGE), timeout=timeout_s)
    assert result.returncode == 0, result
    samples: dict[str, list[Sample]] = {}
    for held in map(json.loads, result.stdout.splitlines()):
        samples.setdefault(held["rank"], []).append(held)
    for first, *_, last in samples.values():
        assert growth(first, last) == []
        for outcome in last["outcomes"]:
            how, ended = outcome.split(": ")
            assert ended == EXPECTED.get(how, "good"), last["outcomes"]

"""`python -m rankwise doctor` on this machine, alone and with ranks that are there."""

import json
import sys
from typing import Any

import pytest

from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner

DOCTOR = (sys.executable, "-m", "rankwise", "doctor")


@pytest.mark.parametrize("options", [["--no-start-methods"], []])
def test_alone(options: list[str], run_script: ScriptRunner) -> None:
    """Two local ranks reduce correctly, and every start method is tried (in tests/cluster, too)."""
    result = run_script.command([*DOCTOR, "--json", *options], timeout=110, siblings=len(options))
    assert result.returncode == 0, result
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["ok"] is True
    assert [rank["global_rank"] for rank in report["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in report["ranks"]}) == 2
    measured = report["collectives"]["all_reduce"]
    assert [one["size"] for one in measured] == [4, 2**12, 2**18, 2**22, 2**25]
    assert all(one["is_right"] and one["seconds"] > 0 for one in measured)
    tried = {method: result["works"] for method, result in report.get("start_methods", {}).items()}
    assert tried == ({} if options else dict.fromkeys(("popen", "spawn", "fork", "forkserver"), True))
    assert all(f"doctor: starting two processes by {method!r}" in result.stderr for method in tried)


def test_a_rank_that_does_not_come(run_script: ScriptRunner) -> None:
    """A missing rank is reported with a remedy, and the exit code is 1."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    result = run_script.command([*DOCTOR, "--timeout", "2"], env=variables, timeout=60, siblings=1)
    assert result.returncode == 1, result
    assert "doctor: connecting 2 ranks (at most 2 s)" in result.stderr
    advice = result.stdout[result.stdout.index("What to fix") :]
    assert "WRONG: " in advice, result
    assert "Fix: " in advice, result

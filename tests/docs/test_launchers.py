"""The programs of docs/launchers.md run; ssh is a stand-in that runs the command here."""

import os
import re
from pathlib import Path

import pytest

from tests.helpers.scripts import ScriptRunner

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ON_THIS_MACHINE = {"num_nodes=2": "num_nodes=1", "devices=1": "devices=2", "10.0.0.1": "127.0.0.1"}


@pytest.mark.parametrize("number", range(2), ids=["commands", "own"])
def test_programs(run_script: ScriptRunner, tmp_path: Path, number: int) -> None:
    """Each runs a function on two ranks; there are no others."""
    assert len(PROGRAMS) == 2
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    ssh.chmod(0o755)
    program = PROGRAMS[number]
    for shown, here in ON_THIS_MACHINE.items():
        program = program.replace(shown, here)
    result = run_script(program, env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert result.returncode == 0, result
    assert result.stdout == "ranks: 2.0\n", result


CHECK = """
    from rankwise.testing import check_launcher

    check_launcher(DDPStrategy(launcher=PoolLauncher(), accelerator="cpu", devices=2))
"""


def test_the_contract_of_a_launcher(run_script: ScriptRunner) -> None:
    """The page's own launcher, here with forks, breaks one rule, as the page says."""
    result = run_script(PROGRAMS[1].replace('"spawn"', '"fork"') + CHECK)
    assert "breaks 1 rule of its contract" in result.stderr, result
    assert "Seen: a rank that raises is a WorkerError with its number and its traceback" in result.stderr

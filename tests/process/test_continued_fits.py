"""A second fit of a module, and a fit from a checkpoint saved between two fits, equal one long fit."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.process import continued_tasks
from tests.process.continued_tasks import differences
from tests.process.helpers import TORCHRUN, with_tests


@pytest.mark.quick
def test_in_one_process(tmp_path: Path) -> None:
    """One process continues, with the random numbers that one long fit would draw."""
    assert differences("single_device", 1, tmp_path, sharded=False) == []


@pytest.mark.soak
def test_in_other_processes(tmp_path: Path) -> None:
    """So do two forked ranks, whose states are in the calling process between the fits."""
    assert differences("ddp_fork", 2, tmp_path, sharded=False) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "kind"),
    [((), "sharded"), pytest.param(TORCHRUN, "whole", marks=pytest.mark.soak)],
    ids=["ddp", "torchrun"],
)
def test_in_a_script(launcher: tuple[str, ...], kind: str, tmp_path: Path, run_script: ScriptRunner) -> None:
    """So do the processes of a script, which keep their own states; optimizers may be sharded over them."""
    script = Path(continued_tasks.__file__)
    command = [sys.executable, *launcher, str(script), "ddp", str(tmp_path), kind]
    result = run_script.command(command, env=with_tests(), siblings=2)
    assert result.returncode == 0, result
    assert [json.loads(line) for line in result.stdout.splitlines()] == [[], []]

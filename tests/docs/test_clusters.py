"""docs/clusters.md: its Python code runs, its programs exist, the doctor's output has its titles."""

import re
import sys
from pathlib import Path

from tests.cluster.digits import VARIABLES
from tests.helpers.scripts import ScriptRunner

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "clusters.md").read_text()
OWN = {"MY_RANK": "0", "MY_SIZE": "1", "MY_LOCAL_RANK": "0", "MY_LOCAL_SIZE": "1"}
OWN |= {"MY_HEAD": "localhost", "MY_PORT": "29500"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_an_environment_of_ones_own(run_script: ScriptRunner) -> None:
    """The class on the page reads its ranks from its own variables."""
    [source] = blocks("python")
    result = run_script(f"{source}\nprint(trainer.strategy.environment)\n", env=OWN)
    assert result.returncode == 0, result
    assert "MY_RANK=0" in result.stdout, result


def test_programs_exist() -> None:
    """Every example in a command exists, and shell scripts are executable."""
    named = set(re.findall(r"examples/[\w/]+\.\w+", "".join(blocks("bash"))))
    assert len(named) >= 10
    for name in named:
        path = REPOSITORY / name
        assert path.exists(), name
        assert path.suffix != ".sh" or path.stat().st_mode & 0o111, name


def test_what_the_doctor_prints(run_script: ScriptRunner) -> None:
    """The titles on the page are those of a report, in order, and its options exist."""
    shown = [line for line in blocks("text")[0].splitlines() if re.match(r"[A-Z]", line)]
    doctor = [sys.executable, "-m", "rankwise", "doctor"]
    result = run_script.command([*doctor, "--no-collectives"], env=VARIABLES, siblings=1)
    assert result.returncode == 0, result
    printed = [line for line in result.stdout.splitlines() if re.match(r"[A-Z]", line)]
    assert [title for title in shown if title != "All-reduce"] == [
        title for title in printed if title in shown
    ], result
    usage = run_script.command([*doctor, "--help"], env=VARIABLES, siblings=1)
    for option in re.findall(r"`(--[\w-]+)", PAGE.partition("## Slurm")[0]):
        assert option in usage.stdout, option

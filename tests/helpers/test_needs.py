"""In CI nothing skips for want of a tool: neither a test nor a stage of `.ci/run`."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.needs import is_ci, need_package

CI_RUN = (Path(__file__).parents[2] / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(None, False), ("", False), ("false", False), ("0", False), ("true", True), ("1", True)],
)
def test_what_is_ci(value: str | None, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`CI` counts where it is set and not false; there an absent package is an error, elsewhere a skip."""
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    assert is_ci() is is_one
    with pytest.raises(ModuleNotFoundError if is_one else pytest.skip.Exception):
        need_package("no_such_package")


@pytest.mark.parametrize(("value", "code"), [("", 0), ("false", 0), ("true", 1)])
def test_clusters_have_to_run_in_ci(value: str, code: int, tmp_path: Path) -> None:
    """Where their tools cannot be had, `.ci/run` says which, and fails in CI."""
    [functions] = re.findall(r"^is_ci\(\).*?(?=^run_lint)", CI_RUN, re.MULTILINE | re.DOTALL)
    functions = functions.replace('PATH="$PATH:/usr/sbin:/sbin" ', "").replace("$EUID -eq 0", "1 -eq 0")
    program = f"{functions}declare -A beside; python=; step() {{ :; }}; in_clone() {{ :; }}; run_clusters"
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", program],
        env={**os.environ, "PATH": str(tmp_path), "CI": value, "work": str(tmp_path), "last_beside": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    assert "not here: slurmctld" in done.stdout
    assert ("the cluster tests have to run" in done.stderr) == (code == 1)
